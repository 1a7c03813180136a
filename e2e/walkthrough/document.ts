/** The outputs in docs/walkthrough.md: each stands in a text block behind a comment that names its phase. */
import { fileURLToPath } from 'node:url';

export const page = fileURLToPath(new URL('../../docs/walkthrough.md', import.meta.url));

const outputs = /<!-- printed: (\S+) -->\n\n```text\n([\s\S]*?)```\n/g;

/** Names of the phases whose output the document shows, in its order. */
export const phasesOf = (document: string): string[] => Array.from(document.matchAll(outputs), ([, phase]) => phase!);

/** The document with every output replaced by what was printed. */
export const fillDocument = (document: string, printed: Readonly<Record<string, string>>): string =>
  document.replace(
    outputs,
    (_, phase: string) =>
      `<!-- printed: ${phase} -->\n\n\`\`\`text\n${printed[phase] ?? 'nothing was printed'}\n\`\`\`\n`,
  );
