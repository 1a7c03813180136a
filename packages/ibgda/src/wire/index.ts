/** mlx5's formats: values to bytes, bytes to values, bytes for people. */
export { type BitValues, readBits, type Violation, violationText, writeBits } from '@ep/native/wire';
export {
  type CommandName,
  type CommandParts,
  type DecodedCommand,
  decodeCommand,
  decodeCommandResult,
  encodeCommand,
} from './command.js';
export { type Cqe, decodeCqe, encodeCqe } from './cqe.js';
export { decodeWqe } from './decode.js';
export { dumpCommand, dumpCqe, dumpWqe, splitQueue } from './dump.js';
export { encodeWqe } from './encode.js';
export {
  commandStatusName,
  cqeOpcodeName,
  opcodeName,
  syndromeName,
} from './names.js';
export {
  type CompletionMode,
  type DataSegment,
  type DecodedWqe,
  type Payload,
  type RemoteAddress,
  type Wqe,
  type WqeBody,
  type WqeHead,
  wqeBlocks,
} from './wqe.js';
