// The settings of an answer that a conversation may have: fields of a request, with what the server allows. One that is not
// given is left to the server, which takes the model's own.

export const SAMPLING = [
  { name: "temperature", label: "Temperature", least: 0, most: 100, hint: "0 always chooses the most likely token." },
  { name: "top_p", label: "Top-p", least: 0, most: 1, hint: "1 is off." },
  { name: "top_k", label: "Top-k", least: 0, most: 10_000_000, isWhole: true, hint: "0 is off." },
  { name: "min_p", label: "Min-p", least: 0, most: 1, hint: "0 is off." },
  { name: "seed", label: "Seed", least: 0, most: Number.MAX_SAFE_INTEGER, isWhole: true, hint: "The same seed gives the same answer." },
  { name: "max_tokens", label: "Max tokens", least: 1, most: 10_000_000, isWhole: true, hint: "Maximum length of an answer." },
];
