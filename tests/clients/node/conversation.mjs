// The same as conversation.py, for Node.

const asks = [
  "Find out what the module does, and say it in one sentence.",
  "Now look at the next one, and compare the two.",
  "Which of them would you rather keep?",
  "Write down what is left to do.",
];
export const MODEL = "sim";
export const SYSTEM = "Be an agent that reads code.";
export const TASKS = asks.map((ask) => `${ask} `.repeat(8));
export const RESULT = "def f(x): return x  # it does nothing, as far as anybody can tell\n".repeat(4);
export const ROUNDS = 24;

/** Where one conversation's tool runs. */
export class Desk {
  calls = [];
  texts = [];

  read({ path, line, deep }) {
    this.calls.push({ path, line, deep });
    return RESULT;
  }
}

/** Do the runs that the command line names. `apis`: by name, functions of base URL, whether to stream, and desk. */
export async function main(apis) {
  const [api, ...runs] = process.argv.slice(2);
  const desks = [];
  for (const run of runs) {
    const how = run.slice(0, run.indexOf("="));
    const desk = new Desk();
    await apis[api](run.slice(how.length + 1), how === "stream", desk);
    desks.push(desk);
  }
  console.log(JSON.stringify(desks));
}
