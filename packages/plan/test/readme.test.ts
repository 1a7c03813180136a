import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { describe, expect, it } from 'vitest';
import * as plan from '../src/index.js';
import * as moe from '../src/moe/index.js';
import * as reference from '../src/reference/index.js';

const readme = readFileSync(join(import.meta.dirname, '..', 'README.md'), 'utf8');
const blocks = (language: string) =>
  [...readme.matchAll(new RegExp(`\`\`\`${language}\n([\\s\\S]*?)\`\`\``, 'g'))].map((match) => match[1]!);
const examples = blocks('ts');
const printed = blocks('text');

describe('README', () => {
  it('has an example of attention and one of experts, and says what each prints', () => {
    expect(examples).toHaveLength(2);
    expect(printed).toHaveLength(2);
  });

  it.each([...examples.keys()])('its example %d runs and prints what the README says', (index) => {
    const modules: Readonly<Record<string, object>> = {
      '@ep/plan': plan,
      '@ep/plan/moe': moe,
      '@ep/plan/reference': reference,
    };
    const body = examples[index]!.replace(
      /^import \{([^}]*)\} from '([^']*)';$/gm,
      (_, names: string, from: string) => {
        for (const name of names.split(',').filter((n) => n.trim() !== ''))
          expect(Object.keys(modules[from]!)).toContain(name.trim());
        return `const {${names}} = modules['${from}'];`;
      },
    );
    const lines: string[] = [];
    new Function('modules', 'console', body)(modules, {
      log: (...values: unknown[]) => lines.push(values.map(String).join(' ')),
    });
    expect(lines.join('\n').trimEnd()).toBe(printed[index]!.trimEnd());
  });
});
