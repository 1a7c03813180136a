// Prints the walkthrough, or with --update writes what it prints into docs/walkthrough.md.
import { readFile, writeFile } from 'node:fs/promises';
import { fillDocument, page } from './document.js';
import { narrate } from './narrate.js';
import { runWalkthrough } from './run.js';

const printed = narrate(await runWalkthrough());
if (process.argv.includes('--update')) await writeFile(page, fillDocument(await readFile(page, 'utf8'), printed));
else for (const [phase, text] of Object.entries(printed)) console.log(`== ${phase} ==\n${text}\n`);
