// For the programs beside: runs cases one after the other and prints what came of each.

export const URL = process.argv[2];
export const MODEL = "fake";
export const KEY = "none";
export const WEATHER = "It is 18 degrees in Paris.";
export const PERSON = { name: "Ada", age: 36 };

export function same(found, right) {
  if (JSON.stringify(found) !== JSON.stringify(right)) throw new Error(`${JSON.stringify(found)} is not ${JSON.stringify(right)}`);
}

export async function gathered(stream, textOf) {
  const pieces = [];
  for await (const each of stream) {
    const text = textOf(each);
    if (text) pieces.push(text);
  }
  if (pieces.length < 3) throw new Error(`not streamed: ${JSON.stringify(pieces)}`);
  return pieces.join("");
}

export async function refused(ask, isRight) {
  let error;
  try {
    await ask();
  } catch (caught) {
    error = caught;
  }
  if (!error || !isRight(error)) throw new Error(`not refused as it should be: ${error}`);
}

export async function run(cases) {
  for (const [name, work] of Object.entries(cases)) {
    let said = "ok";
    try {
      await work();
    } catch (error) {
      said = JSON.stringify(String(error.stack ?? error).slice(0, 1500));
    }
    console.log(`case ${name}: ${said}`);
  }
}
