// What the tabs of this page tell each other, so that each shows what the others stored.

const channel = "BroadcastChannel" in window ? new BroadcastChannel("kt") : null;

// kinds: "changed" (a conversation, by its id, and which of its messages), "gone" and "erased" (one that was deleted, and
// for good), "answering" and "answered" (a message that this tab is writing, and has written), "who" (asks which these are).
export const tell = (kind, about = {}) => channel?.postMessage({ kind, ...about });

export function listen(handlers) {
  if (channel) channel.onmessage = ({ data }) => handlers[data.kind]?.(data);
}
