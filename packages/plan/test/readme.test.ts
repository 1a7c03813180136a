import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { describe, expect, it } from 'vitest';
import * as plan from '../src/index.js';
import * as reference from '../src/reference/index.js';

const readme = readFileSync(join(import.meta.dirname, '..', 'README.md'), 'utf8');
const [example] = [...readme.matchAll(/```ts\n([\s\S]*?)```/g)].map((match) => match[1]!);
const [printed] = [...readme.matchAll(/```text\n([\s\S]*?)```/g)].map((match) => match[1]!);

describe('README', () => {
  it('its example runs and prints what the README says', () => {
    const modules: Readonly<Record<string, object>> = { '@ep/plan': plan, '@ep/plan/reference': reference };
    const body = example!.replace(/^import \{([^}]*)\} from '([^']*)';$/gm, (_, names: string, from: string) => {
      for (const name of names.split(',').filter((n) => n.trim() !== ''))
        expect(Object.keys(modules[from]!)).toContain(name.trim());
      return `const {${names}} = modules['${from}'];`;
    });
    const lines: string[] = [];
    new Function('modules', 'console', body)(modules, {
      log: (...values: unknown[]) => lines.push(values.map(String).join(' ')),
    });
    expect(lines.join('\n').trimEnd()).toBe(printed!.trimEnd());
  });
});
