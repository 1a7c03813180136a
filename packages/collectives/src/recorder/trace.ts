/** `@ep/collectives/trace`: dumps of flight recorders, for programs that read them. Loads no addon. */
export {
  CALL_KINDS,
  CALL_STATES,
  type CallKind,
  type CallState,
  DUMP_REASONS,
  type DumpReason,
  readTraceDump,
  TRACE_FORMAT,
  TRACE_VERSION,
  type TraceDump,
  type TraceEntry,
  type TraceGroup,
} from './dump-format.js';
