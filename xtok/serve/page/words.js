// What the page says, in the language of the browser.

const WORDS = {
  en: {
    prompt: "Prompt", examples: "Examples", asChat: "as a chat", picks: "Picks", greedy: "greedy", sampled: "sampled",
    temperature: "temperature", seed: "seed", penalty: "repetition penalty", length: "new tokens", drafts: "Drafts",
    write: "Write", stop: "Stop", race: "race the target alone", key: "API key", open: "Open a trace", save: "Save the trace",
    previous: "◀ previous", next: "next ▶", place: "round",
    served: (model, drafts) => `${model}, helped by ${drafts.join(", ") || "no draft"}`,
    loading: "The models are being loaded.", locked: "This server wants its API key.", waiting: "Another text is being written; this one comes next.",
    writing: "Writing …", stopped: "Stopped.", done: "Done.", lost: "The connection was lost; this is what had come.",
    gone: "The server doesn't answer.", broken: "This is no trace of xtok.", failed: (told) => `It failed: ${told}`,
    drafted: "with drafts", alone: "the target alone", trace: "trace", ownPick: "the target's own pick",
    clock: (tokens, forwards, seconds) => `${tokens} tokens, ${forwards} forwards, ${seconds.toFixed(2)} s`,
    round: (number, count) => `Round ${number} of ${count}`,
    told: (guessed, right, committed) => `${guessed} guessed, ${right} right, ${committed} committed by one forward`,
    nothing: "Nothing was guessed in this round.",
    yes: "identical: yes", no: (number) => `identical: no (from token ${number} on)`, unknown: "identical: unknown, for one of them didn't end",
    forwardsUsed: "forwards of the target", forwardsSaved: "saved", perForward: "tokens per forward", seconds: "seconds",
    speed: "speed", overTime: "Tokens per forward, round by round", whereTime: "Where the time went",
    target: "target", forwards: "draft forwards", guessing: "other guessing", aligning: "alignment", rest: "rest",
    draft: "draft", guessedCount: "guessed", rightCount: "right", figures: "Forwards and seconds", who: "Who guessed",
  },
  ja: {
    prompt: "プロンプト", examples: "例文", asChat: "対話として", picks: "選び方", greedy: "貪欲法", sampled: "サンプリング",
    temperature: "温度", seed: "シード", penalty: "繰り返しペナルティ", length: "新しいトークン数", drafts: "ドラフト",
    write: "生成", stop: "停止", race: "ターゲット単独と競争", key: "APIキー", open: "トレースを開く", save: "トレースを保存",
    previous: "◀ 前へ", next: "次へ ▶", place: "ラウンド",
    served: (model, drafts) => `${model}（ドラフト: ${drafts.join("、") || "なし"}）`,
    loading: "モデルを読み込んでいます。", locked: "APIキーを入力してください。", waiting: "ほかの文章を生成中です。終わりしだい始めます。",
    writing: "生成中…", stopped: "停止しました。", done: "完了しました。", lost: "接続が切れました。ここまでに届いた分を表示しています。",
    gone: "サーバーが応答しません。", broken: "xtokのトレースではありません。", failed: (told) => `失敗しました: ${told}`,
    drafted: "ドラフトあり", alone: "ターゲット単独", trace: "トレース", ownPick: "ターゲット自身の選択",
    clock: (tokens, forwards, seconds) => `${tokens}トークン、${forwards}回の順伝播、${seconds.toFixed(2)}秒`,
    round: (number, count) => `${count}ラウンド中${number}番目`,
    told: (guessed, right, committed) => `推測${guessed}個、的中${right}個、1回の順伝播で${committed}個を確定`,
    nothing: "このラウンドでは推測がありませんでした。",
    yes: "完全に一致: はい", no: (number) => `完全に一致: いいえ（${number}番目のトークンから相違）`, unknown: "完全に一致: 不明（片方が終わっていません）",
    forwardsUsed: "ターゲットの順伝播", forwardsSaved: "節約", perForward: "順伝播あたりのトークン数", seconds: "秒",
    speed: "速度", overTime: "ラウンドごとの確定トークン数", whereTime: "時間の内訳",
    target: "ターゲット", forwards: "ドラフトの順伝播", guessing: "その他の推測", aligning: "対応付け", rest: "その他",
    draft: "ドラフト", guessedCount: "推測", rightCount: "的中", figures: "順伝播と時間", who: "だれが当てたか",
  },
};

export const language = navigator.language.toLowerCase().startsWith("ja") ? "ja" : "en";
export const words = WORDS[language];
