"""Answers that are held to a JSON schema: what the schema forces is guessed, and what it forbids isn't.

`python examples/json_schema.py smollm2` takes a chat model (fetched once, 93 MB) and six texts in place of the pair that ships,
and compares tokens per forward and CPU seconds with those of a processor of which xtok knows nothing, in turns.
"""

import sys
from time import process_time

from llguidance import LLMatcher, hf
from transformers import LogitsProcessorList

from xtok import Grammar, HeadsDrafter, XTokAssisted
from xtok.pair import pair

TEXTS = {
    "company city country order_date number_of_vessels shipyard chief_executive contract_value first_ship_name contact_email": (
        "On 14 March 2019 the shipping company Nordvik Lines, based in Bergen, Norway, ordered three container vessels "
        "from the yard Hanjin Heavy Industries in Busan. The contract, signed by chief executive Ingrid Solberg, is "
        "worth 240 million dollars. The first ship, the Aurora, will be delivered in June 2021. Questions go to "
        "press@nordvik.example."
    ),
    "name profession university city country prize year age project presenter": (
        "Dr. Amelia Hart, a marine biologist at the University of Otago in Dunedin, New Zealand, has received the Blue "
        "Planet Prize for 2022. She is 47 years old, speaks English and Maori, and has led the Kelp Forest Project since "
        "2011. The prize of 50,000 dollars was handed over by Kenji Watanabe in Auckland."
    ),
    "invoice_number seller seller_city customer customer_address first_item first_quantity total due_date bank": (
        "Invoice 2023-0817 from Bright Paper GmbH, Hamburg, to the bookshop Lindgren & Sons, 12 Harbour Street, Malmo. "
        "40 boxes of writing paper at 8.50 euros and 12 boxes of envelopes at 4.20 euros. Total 390.40 euros, due on 15 "
        "September 2023. Please pay to the account DE12 3456 7890 at Hansebank, reference 817-LS."
    ),
    "origin destination departure_time arrival_time platform train operator ticket_price reservation_price change_station": (
        "The train from Vienna to Zagreb leaves at 6:58 from platform 9 and arrives at 13:37. It is the EC 151 Emona, "
        "operated by Austrian Railways, with a dining car and bicycle spaces. A second class ticket costs 49 euros, a "
        "seat reservation 3 euros. Passengers change in Maribor, where the stop takes 12 minutes."
    ),
    "dish chef main_ingredient lentils_grams carrots servings preparation_minutes cooking_minutes book publisher": (
        "For the lentil soup of chef Maria Conti you need 250 grams of red lentils, two carrots, one onion, a litre of "
        "vegetable stock and a spoon of cumin. It serves four people, takes 15 minutes to prepare and 30 minutes to "
        "cook. The recipe is from her book Winter Kitchen, which Orchard Press published in 2018."
    ),
    "patient birth_date visit_date symptom temperature pulse doctor medicine dose next_appointment": (
        "Patient Thomas Berg, born on 3 May 1961, came to the clinic on 9 January with a cough and a temperature of 38.4 "
        "degrees. Blood pressure was 135 over 85, pulse 92. Dr. Sara Lind prescribed amoxicillin, 500 milligrams three "
        "times a day for seven days. He is allergic to aspirin. The next appointment is on 16 January."
    ),
}
NUMBERS = {"number_of_vessels", "year", "age", "first_quantity", "platform", "lentils_grams", "carrots", "servings", "pulse"}

models = pair(sys.argv[1] if len(sys.argv) > 1 else "aozora")
heads = HeadsDrafter(models.heads)
known = XTokAssisted(models.target, heads)
unknown = XTokAssisted((known.model, known.tokenizer), heads)
tokenizer = hf.from_tokenizer(known.tokenizer, eos_token=known.model.generation_config.eos_token_id)


def matcher(fields):
    """Reads an object of these fields."""
    kinds = {one: {"type": "integer"} if one in NUMBERS else {"type": "string", "maxLength": 60} for one in fields}
    schema = {"type": "object", "properties": kinds, "required": fields, "additionalProperties": False}
    return LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(schema))


def answer(xt, fields, text, processor):
    """The generation, and its CPU seconds."""
    wanted = f"Extract the facts of this text as a JSON object with the fields {', '.join(fields)}.\n\n{text}"
    prompt = [{"role": "user", "content": wanted}] if models.chats else text
    start = process_time()
    g = xt.generate(prompt, max_new_tokens=250, do_sample=False, logits_processor=LogitsProcessorList([processor]))
    return g, process_time() - start


totals = {"as any processor": [0, 0, 0.0], "as a format": [0, 0, 0.0]}
for _ in range(2 if models.chats else 1):
    for names, text in list(TEXTS.items())[: None if models.chats else 1]:
        fields = names.split()
        hidden = Grammar(matcher(fields))
        runs = {
            "as any processor": answer(unknown, fields, text, lambda ids, scores, held=hidden: held(ids, scores)),
            "as a format": answer(known, fields, text, Grammar(matcher(fields))),
        }
        (a, _), (b, _) = runs.values()
        print("the same ids:", "yes" if a.token_ids == b.token_ids else "no")
        for way, (g, seconds) in runs.items():
            new = g.stats.new_tokens, g.stats.target_forwards, seconds
            totals[way] = [before + more for before, more in zip(totals[way], new, strict=True)]
        for way, (tokens, forwards, seconds) in totals.items():
            print(f"{way}: so far {tokens / forwards:.2f} tokens per forward, {tokens / seconds:.1f} tokens per CPU second")
