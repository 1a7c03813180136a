/** What only the ranks of one job know, and the keys that are made of it. The secret itself is never sent. */
import { hkdfSync } from 'node:crypto';
import { readFileSync } from 'node:fs';
import { checkAttached } from './buffers.js';
import type { Environment } from './env.js';
import { checkObject, EpError, invalid } from './errors.js';

/** At least 16 bytes that nobody guesses; `none`: a network on which everybody is trusted. */
export type JobSecret = string | Uint8Array;

/** HAZARD: whoever speaks to a store sees proofs of the secret. A short one could be found from a recorded proof, by trying. */
const LEAST_BYTES = 16;
const MOST_BYTES = 4096;
/** HKDF takes 1 024 bytes. */
const MOST_PURPOSE = 256;
const OFF = 'none';
const WHERE = 'job secret';

/** A secret that is used, or `none` where somebody has said so. */
export type ResolvedSecret = Uint8Array | typeof OFF;

function checked(given: unknown, what: string): ResolvedSecret {
  if (given === OFF) return OFF;
  const bytes = typeof given === 'string' ? new TextEncoder().encode(given) : given;
  if (bytes instanceof Uint8Array && bytes.byteLength >= LEAST_BYTES && bytes.byteLength <= MOST_BYTES)
    return Uint8Array.from(bytes);
  const expected = `${LEAST_BYTES} to ${MOST_BYTES} bytes that nobody guesses, for example of \`openssl rand -hex 32\`, or "${OFF}"`;
  // Never the value itself: it may be most of a secret.
  const found = bytes instanceof Uint8Array ? `${bytes.byteLength} bytes` : typeof given;
  throw invalid(what, { where: WHERE, expected, found });
}

function readSecretFile(path: string): ResolvedSecret {
  let text: string;
  try {
    text = readFileSync(path, 'utf8');
  } catch (cause) {
    const { code = String(cause) } = cause as NodeJS.ErrnoException;
    throw new EpError('EP_SYSTEM', `${WHERE}: EP_JOB_SECRET_FILE ${JSON.stringify(path)} cannot be read: ${code}`, {
      context: { path },
      cause,
    });
  }
  return checked(text.trimEnd(), 'the content of EP_JOB_SECRET_FILE, without white space at its end,');
}

/**
 * The secret that was given, or that of EP_JOB_SECRET, or of the file that EP_JOB_SECRET_FILE names; undefined where there is none. Throws
 * `EP_INVALID_ARGUMENT` for one that is too short, `EP_SYSTEM` for a file that cannot be read.
 */
export function resolveJobSecret(
  given: JobSecret | undefined,
  env: Environment = process.env,
): ResolvedSecret | undefined {
  if (given !== undefined) return checked(given, 'secret');
  checkObject(env, 'env', 'an object of variables, as process.env', WHERE);
  const { EP_JOB_SECRET: text = '', EP_JOB_SECRET_FILE: path = '' } = env;
  if (text !== '') return checked(text, 'EP_JOB_SECRET');
  return path === '' ? undefined : readSecretFile(path);
}

/**
 * 32 bytes for one purpose: whoever learns them learns nothing of the secret, nor of the keys for other purposes. Throws `EP_INVALID_ARGUMENT` for a
 * secret or a salt that is not bytes, and for a purpose that is not a short text; `EP_DETACHED` for a buffer that is gone.
 */
export function jobKey(secret: Uint8Array, purpose: string, salt: Uint8Array = new Uint8Array(0)): Buffer {
  for (const [what, bytes] of Object.entries({ secret, salt })) {
    if (!(bytes instanceof Uint8Array)) throw invalid(what, { where: WHERE, expected: 'a Uint8Array', found: bytes });
    // HAZARD: as a dead buffer is read as an empty one, everybody could make the key.
    checkAttached(bytes, `${WHERE}: ${what}`);
  }
  if (typeof purpose !== 'string' || purpose.length > MOST_PURPOSE)
    throw invalid('purpose', { where: WHERE, expected: `text of at most ${MOST_PURPOSE} characters`, found: purpose });
  return Buffer.from(hkdfSync('sha256', secret, salt, `@ep ${purpose}`, 32));
}

/** Where others than this host's processes could take part, and no secret keeps them out. */
export function secretMissing(what: string): EpError<'EP_SECRET'> {
  return new EpError(
    'EP_SECRET',
    `${what}, and there is no job secret: give all ranks the same EP_JOB_SECRET (or EP_JOB_SECRET_FILE, or the option secret), or "${OFF}" on a network on which everybody is trusted`,
  );
}
