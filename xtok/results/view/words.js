// All words that are shown, in the language of the browser.

const several = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

const WORDS = {
  en: {
    prompt: "Prompt", placeholder: "Ask something, or begin a text …", examples: "Try", asChat: "Use the chat template",
    advanced: "Advanced", decoding: "Decoding", greedy: "greedy", sampled: "sampling", temperature: "temperature", seed: "seed",
    penalty: "repetition penalty", length: "max new tokens",
    generate: "Generate", stop: "Stop", key: "API key",
    sample: "Open the sample", sampleOpened: "A sample: the bundled Japanese demo models", open: "Open a trace", save: "Save the trace", previous: "◀ Previous", next: "Next ▶", position: "Round",
    intro: "Lossless speculative decoding, token by token", served: (model, drafts) => `${model} · ${drafts.join(" · ") || "no draft"}`,
    hint: "In each round, one forward pass of the target checks all that the drafts guessed. Point at a token, or use the arrow keys, to see its round.",
    wrongKey: "This server has another API key.",
    loading: "The models are being loaded.", locked: "This server requires its API key.",
    writing: "Generating …", stopped: "Stopped.", done: "Done.", lost: "The connection was lost. This is what had arrived.",
    gone: "The server doesn't respond.", broken: "This is not an xtok trace.", failed: (error) => `The request failed: ${error}`,
    ownPick: "the target's own pick",
    clock: (tokens, forwards, seconds) => `${several(tokens, "token")} · ${forwards} forward pass${forwards === 1 ? "" : "es"} · ${seconds.toFixed(2)} s${seconds ? ` · ${(tokens / seconds).toFixed(1)} tokens/s` : ""}`,
    round: (number, count) => `Round ${number} of ${count}`,
    counts: (guessed, accepted, committed) => `${several(guessed, "token")} guessed, ${accepted} accepted; this forward pass gave ${several(committed, "token")}`,
    nothing: "Nothing was guessed in this round.",
    fewer: "fewer forward passes", perSecond: "tokens per second",
    ties: (count, first, margin) => `Near-ties: ${count}, the first at token ${first} (margin ${margin.toPrecision(2)}). From there model.generate may give another text, for its forward passes have other shapes.`,
    forwardsUsed: "forward passes", forwardsSaved: "saved", perForward: "tokens per pass", seconds: "seconds",
    overTime: "Tokens per forward pass, round by round", mean: "mean of 8 rounds", timeParts: "Where the time went",
    target: "target's forward passes", forwards: "draft's forward passes", guessing: "other guessing", aligning: "alignment", rest: "rest",
    draft: "draft", guessedCount: "guessed", acceptedCount: "accepted", rate: "rate", figures: "Forward passes and time", who: "Accepted tokens by draft",
  },
  ja: {
    prompt: "プロンプト", placeholder: "質問や文章の書き出しを入力…", examples: "例", asChat: "チャットテンプレートを使う",
    advanced: "詳細設定", decoding: "デコード方法", greedy: "貪欲法", sampled: "サンプリング", temperature: "温度", seed: "シード",
    penalty: "繰り返しペナルティ", length: "最大生成トークン数",
    generate: "生成", stop: "停止", key: "APIキー",
    sample: "サンプルを開く", sampleOpened: "サンプル: 同梱の日本語デモモデルによる生成", open: "トレースを開く", save: "トレースを保存", previous: "◀ 前へ", next: "次へ ▶", position: "ラウンド",
    intro: "出力を変えない投機的デコーディングをトークンごとに表示", served: (model, drafts) => `${model} · ${drafts.join(" · ") || "ドラフトなし"}`,
    hint: "各ラウンドでは、ドラフトの推測をターゲットが1回の順伝播でまとめて検証します。トークンにポインタを合わせるか矢印キーで移動すると、そのラウンドが表示されます。",
    wrongKey: "APIキーが違います。",
    loading: "モデルを読み込んでいます。", locked: "APIキーを入力してください。",
    writing: "生成中…", stopped: "停止しました。", done: "完了しました。", lost: "接続が切れました。ここまでに届いた分を表示しています。",
    gone: "サーバーが応答しません。", broken: "xtokのトレースではありません。", failed: (error) => `失敗しました: ${error}`,
    ownPick: "ターゲット自身の選択",
    clock: (tokens, forwards, seconds) => `${tokens}トークン · 順伝播${forwards}回 · ${seconds.toFixed(2)}秒${seconds ? ` · 毎秒${(tokens / seconds).toFixed(1)}トークン` : ""}`,
    round: (number, count) => `ラウンド ${number}/${count}`,
    counts: (guessed, accepted, committed) => `推測${guessed}個のうち${accepted}個を採択。この順伝播で${committed}トークンが確定`,
    nothing: "このラウンドでは推測がありませんでした。",
    fewer: "順伝播の効率（単独比）", perSecond: "トークン/秒",
    ties: (count, first, margin) => `僅差の選択: ${count}か所、最初は${first}番目のトークン（差${margin.toPrecision(2)}）。順伝播の形が異なるmodel.generateでは、そこから別の文章になることがあります。`,
    forwardsUsed: "順伝播", forwardsSaved: "削減", perForward: "トークン/順伝播", seconds: "秒",
    overTime: "ラウンドごとの確定トークン数", mean: "8ラウンドの平均", timeParts: "時間の内訳",
    target: "ターゲットの順伝播", forwards: "ドラフトの順伝播", guessing: "その他の推測", aligning: "対応付け", rest: "その他",
    draft: "ドラフト", guessedCount: "推測", acceptedCount: "採択", rate: "採択率", figures: "順伝播と時間", who: "ドラフト別の採択トークン",
  },
};

export const language = navigator.language.toLowerCase().startsWith("ja") ? "ja" : "en";
export const words = WORDS[language];
