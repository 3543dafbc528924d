/**
 * Prints what a machine decides in a random world, to compare a machine in another language with it:
 *
 *     node tests/user/js/trace.js SEED
 *
 * The first line has the options of the machine, each other line one event, its time, and the actions.
 */

import { run } from "./world.js";

const { driver } = run(Number(process.argv[2] ?? 1));
const lines = [{ options: driver.options }, ...driver.trace];
process.stdout.write(lines.map((line) => `${JSON.stringify(line)}\n`).join(""));
