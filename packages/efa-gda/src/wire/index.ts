/** EFA's formats: values to bytes, bytes to values, bytes for people. */
export { type Violation, violationText } from '@ep/native/wire';
export { type Cqe, type CqeBytes, decodeCqe, encodeCqe } from './cqe.js';
export { decodeWqe } from './decode.js';
export { dumpCqe, dumpReceive, dumpWqe } from './dump.js';
export { encodeWqe } from './encode.js';
export { opcodeName, statusName } from './names.js';
export { type DecodedReceive, decodeReceive, encodeReceive, type Receive } from './receive.js';
export type {
  DataSegment,
  DecodedWqe,
  Payload,
  RemoteAddress,
  Wqe,
  WqeBody,
  WqeBytes,
  WqeHead,
} from './wqe.js';
