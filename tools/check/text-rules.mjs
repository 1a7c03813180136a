// Rules about the text of files that no linter of a single language covers.

/**
 * @typedef {{ name: string, files: RegExp, except?: RegExp, pattern: RegExp, why: string }} TextRule
 *   files and except match the path from the root; pattern is tried on each line
 */

const code = /\.(?:[cm]?[jt]s|[ch](?:pp|c)?|cuh?|sh)$/;
const ownFiles = /^tools\/check\/text-rules(?:\.test)?\.mjs$/;

/** @type {readonly TextRule[]} */
export const textRules = [
  {
    name: 'machine path',
    files: /./,
    except: ownFiles,
    // A path that starts at the root and names a folder which exists only on someone's machine.
    pattern: /(?:^|[\s"'`(=:,[])\/(?:work|root|tmp|home\/\w+|Users\/\w+)(?:\/|\b(?![\w-]))/,
    why: 'it exists on one machine only: use a relative path, os.tmpdir() or mktemp',
  },
  {
    name: 'registry host',
    files: /./,
    except: ownFiles,
    pattern: /\bregistry\.[\w-]+\.(?:org|com|io)\b|\/\/[\w.-]*(?:artifactory|verdaccio|nexus)[\w.-]*[:/]/i,
    why: 'which registry serves a package is the business of whoever installs it',
  },
  {
    name: 'focused or disabled test',
    files: /\.(?:test|test-d|spec)\.[cm]?[jt]s$/,
    except: ownFiles,
    pattern:
      /\b(?:describe|it|test|suite|bench)(?:\.\w+)*\.(?:only|skip|todo|fails)\b|\b(?:fdescribe|fit|xdescribe|xit|xtest)\(/,
    why: 'a test that does not run proves nothing; a capability that is absent is recorded, not skipped',
  },
  {
    name: 'unowned to-do',
    files: code,
    except: ownFiles,
    pattern: /\b(?:TODO|FIXME|XXX|HACK)\b(?!\(#\d+\))/,
    why: 'write it as TODO(#issue), or do it',
  },
  {
    name: 'Node-API outside native/napi',
    files: /^native\/.*\.(?:[ch](?:pp|c)?|cuh?)$/,
    except: /^native\/napi\//,
    pattern: /^(?!\s*(?:\/\/|\*)).*(?:\bNapi::|#\s*include\s*[<"](?:napi|node_api)\.h[>"])/,
    why: 'core, nic and kernels are tested without Node; only native/napi sees it',
  },
  {
    name: 'CUDA runtime outside native/cuda',
    files: /^native\/.*\.(?:[ch](?:pp|c)?|cuh?)$/,
    except: /^native\/cuda\//,
    pattern: /#\s*include\s*[<"]cuda_runtime(?:_api)?\.h[>"]/,
    why: 'everything else builds where no CUDA is installed',
  },
];

/**
 * @param {string} path
 * @param {string} text
 * @param {readonly TextRule[]} [rules]
 * @returns {string[]} one line per finding: path:line: rule: why
 */
export function findTextProblems(path, text, rules = textRules) {
  const applicable = rules.filter((rule) => rule.files.test(path) && !rule.except?.test(path));
  if (applicable.length === 0) return [];
  return text
    .split('\n')
    .flatMap((line, index) =>
      applicable
        .filter((rule) => rule.pattern.test(line))
        .map((rule) => `${path}:${index + 1}: ${rule.name}: ${line.trim().slice(0, 100)}\n    ${rule.why}`),
    );
}
