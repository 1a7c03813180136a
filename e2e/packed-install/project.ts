import { mkdirSync, mkdtempSync, readFileSync, rmSync, symlinkSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import ts from 'typescript';
import { command, type Ended, repository } from './command.js';

export type Tarballs = Readonly<Record<string, string>>;
export type Resolution = 'nodenext' | 'bundler';

const compilerOptions = {
  nodenext: { module: 'NodeNext', moduleResolution: 'NodeNext' },
  bundler: { module: 'ESNext', moduleResolution: 'bundler' },
} as const satisfies Record<Resolution, object>;

/** An empty project outside of the repository, on a machine without compilers: PATH holds node and nothing else. */
export class Project implements Disposable {
  readonly #dir = mkdtempSync(join(tmpdir(), 'ep-consumer-'));
  /** What the consumer imports, and so all that its package.json lists. */
  readonly #imports: readonly string[];
  readonly #env: NodeJS.ProcessEnv;

  constructor(consumer: string) {
    const bin = join(this.#dir, 'bin');
    mkdirSync(bin);
    symlinkSync(process.execPath, join(bin, 'node'));
    // HAZARD: NODE_PATH, npm_* and EP_* of the surrounding test run would let a package find what it did not declare.
    const kept = Object.entries(process.env).filter(([name]) => /^(?:HOME|TMPDIR|LANG|XDG_\w+)$/.test(name));
    this.#env = { ...Object.fromEntries(kept), PATH: bin };
    const source = readFileSync(consumer, 'utf8');
    // Entries of one package (`@ep/plan/moe`) are one dependency.
    this.#imports = [...new Set([...source.matchAll(/from '(@ep\/[^'/]+)/g)].map((match) => match[1]!))];
    this.#write('consumer.mts', source);
    const target = { target: ts.ScriptTarget.ES2022, module: ts.ModuleKind.ESNext };
    this.#write('consumer.mjs', ts.transpileModule(source, { compilerOptions: target }).outputText);
  }

  /**
   * Installs what the consumer imports. Packages of ours come from the tarballs; those that are not among them
   * (platform packages of other machines) are taken out, since no registry has this version yet.
   */
  async install(tarballs: Tarballs, absent: readonly string[]): Promise<Ended> {
    const file = (packed: string) => `file:${packed}`;
    const dependencies = Object.fromEntries(this.#imports.map((name) => [name, file(tarballs[name] ?? 'not-packed')]));
    this.#write('package.json', { private: true, type: 'module', dependencies });
    const overrides = [
      ...Object.entries(tarballs).map(([packed, tarball]) => [packed, file(tarball)]),
      ...absent.map((missing) => [missing, '-']),
    ];
    // JSON is YAML.
    this.#write('pnpm-workspace.yaml', { packages: ['.'], overrides: Object.fromEntries(overrides) });
    const pnpm = join(repository, 'tools/setup/pnpm.mjs');
    return this.#run(process.execPath, [pnpm, 'install', '--no-frozen-lockfile', '--prefer-offline']);
  }

  /** Type-checks the consumer, declaration files of the packages included. */
  check(resolution: Resolution): Promise<Ended> {
    const config = `tsconfig.${resolution}.json`;
    this.#write(config, {
      compilerOptions: {
        ...compilerOptions[resolution],
        target: 'ES2022',
        lib: ['ES2023', 'ESNext.Disposable'],
        strict: true,
        exactOptionalPropertyTypes: true,
        noEmit: true,
        skipLibCheck: false,
        types: ['node'],
        typeRoots: [join(repository, 'node_modules/@types')],
      },
      files: ['consumer.mts'],
    });
    return this.#run(process.execPath, [join(repository, 'node_modules/typescript/bin/tsc'), '-p', config]);
  }

  run(node: string): Promise<Ended> {
    return this.#run(node, ['consumer.mjs']);
  }

  /** Whether a command can be started where the packages were installed. */
  async has(name: string): Promise<boolean> {
    return (await this.#run(name, ['--version'])).status !== 'ENOENT';
  }

  [Symbol.dispose](): void {
    rmSync(this.#dir, { recursive: true, force: true });
  }

  #run(file: string, args: readonly string[]): Promise<Ended> {
    return command(file, args, { cwd: this.#dir, env: this.#env });
  }

  #write(name: string, content: string | object): void {
    writeFileSync(join(this.#dir, name), typeof content === 'string' ? content : JSON.stringify(content, null, 2));
  }
}
