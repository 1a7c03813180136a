/** DevX commands as values: each is a set of layouts at fixed places. */
import { EpError, invalid } from '@ep/core';
import {
  type BitLayout,
  EP_MLX5_ADS_AT,
  EP_MLX5_CMD_2ERR_QP,
  EP_MLX5_CMD_2RST_QP,
  EP_MLX5_CMD_CREATE_CQ,
  EP_MLX5_CMD_CREATE_QP,
  EP_MLX5_CMD_DESTROY_CQ,
  EP_MLX5_CMD_DESTROY_QP,
  EP_MLX5_CMD_IN_BYTES,
  EP_MLX5_CMD_INIT2RTR_QP,
  EP_MLX5_CMD_QUERY_CQ,
  EP_MLX5_CMD_QUERY_HCA_CAP,
  EP_MLX5_CMD_QUERY_QP,
  EP_MLX5_CMD_RST2INIT_QP,
  EP_MLX5_CMD_RTR2RTS_QP,
  EP_MLX5_CQC_AT,
  EP_MLX5_CREATE_CQ_IN_BYTES,
  EP_MLX5_CREATE_QP_IN_BYTES,
  EP_MLX5_MODIFY_QP_IN_BYTES,
  EP_MLX5_QPC_AT,
  mlx5AdsBits,
  mlx5CmdInBits,
  mlx5CmdOutBits,
  mlx5CqcBits,
  mlx5CreateCqInBits,
  mlx5CreateQpInBits,
  mlx5ModifyQpInBits,
  mlx5QpcBits,
} from '@ep/native/abi';
import { type BitValues, hex, readBits, strayBits, type Violation, writeBits } from '@ep/native/wire';

interface Part<L extends BitLayout = BitLayout> {
  readonly layout: L;
  readonly at: number;
}

interface CommandFormat {
  readonly opcode: number;
  readonly byteLength: number;
  readonly parts: Readonly<Record<string, Part>>;
}

const command = { layout: mlx5CmdInBits, at: 0 } as const;
const queuePair = {
  context: { layout: mlx5QpcBits, at: EP_MLX5_QPC_AT },
  path: { layout: mlx5AdsBits, at: EP_MLX5_QPC_AT + EP_MLX5_ADS_AT },
} as const;

const bare = (opcode: number) => ({ opcode, byteLength: EP_MLX5_CMD_IN_BYTES, parts: { command } }) as const;

const transition = (opcode: number) =>
  ({
    opcode,
    byteLength: EP_MLX5_MODIFY_QP_IN_BYTES,
    parts: { command, modify: { layout: mlx5ModifyQpInBits, at: 0 }, ...queuePair },
  }) as const;

/** What is sent for each command. The opcode is filled in. */
const FORMATS = {
  'query-hca-cap': bare(EP_MLX5_CMD_QUERY_HCA_CAP),
  'create-cq': {
    opcode: EP_MLX5_CMD_CREATE_CQ,
    byteLength: EP_MLX5_CREATE_CQ_IN_BYTES,
    parts: {
      command,
      memory: { layout: mlx5CreateCqInBits, at: 0 },
      context: { layout: mlx5CqcBits, at: EP_MLX5_CQC_AT },
    },
  },
  'destroy-cq': bare(EP_MLX5_CMD_DESTROY_CQ),
  'query-cq': bare(EP_MLX5_CMD_QUERY_CQ),
  'create-qp': {
    opcode: EP_MLX5_CMD_CREATE_QP,
    byteLength: EP_MLX5_CREATE_QP_IN_BYTES,
    parts: { command, memory: { layout: mlx5CreateQpInBits, at: 0 }, ...queuePair },
  },
  'destroy-qp': bare(EP_MLX5_CMD_DESTROY_QP),
  'rst2init-qp': transition(EP_MLX5_CMD_RST2INIT_QP),
  'init2rtr-qp': transition(EP_MLX5_CMD_INIT2RTR_QP),
  'rtr2rts-qp': transition(EP_MLX5_CMD_RTR2RTS_QP),
  '2err-qp': bare(EP_MLX5_CMD_2ERR_QP),
  '2rst-qp': bare(EP_MLX5_CMD_2RST_QP),
  'query-qp': bare(EP_MLX5_CMD_QUERY_QP),
} as const satisfies Readonly<Record<string, CommandFormat>>;

type Formats = typeof FORMATS;

export type CommandName = keyof Formats;

/** Fields that are not given are 0. */
export type CommandParts<N extends CommandName> = {
  readonly [P in keyof Formats[N]['parts']]?: Formats[N]['parts'][P] extends Part<infer L>
    ? Partial<BitValues<L>>
    : never;
};

export interface DecodedCommand {
  readonly name: CommandName;
  /** part -> field -> value */
  readonly parts: Readonly<Record<string, Readonly<Record<string, number | bigint>>>>;
  readonly violations: readonly Violation[];
}

/** Throws `EP_INVALID_ARGUMENT` for a value that its field cannot hold. */
export function encodeCommand<N extends CommandName>(name: N, parts: CommandParts<N>): Uint8Array<ArrayBuffer> {
  const format: CommandFormat = FORMATS[name];
  const bytes = new Uint8Array(format.byteLength);
  const view = new DataView(bytes.buffer);
  for (const [part, values] of Object.entries(parts as Readonly<Record<string, object>>)) {
    const place = format.parts[part];
    if (place === undefined)
      throw invalid(part, { where: name, expected: Object.keys(format.parts).join(', '), found: part });
    writeBits(place.layout, view, place.at, values);
  }
  writeBits(mlx5CmdInBits, view, 0, { opcode: format.opcode });
  return bytes;
}

/** Throws `EP_INVALID_ARGUMENT` for an unknown opcode or another length than the command has. */
export function decodeCommand(bytes: Uint8Array): DecodedCommand {
  if (bytes.byteLength < EP_MLX5_CMD_IN_BYTES)
    throw new EpError('EP_INVALID_ARGUMENT', `a command has at least 16 bytes, found ${bytes.byteLength}`);
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const { opcode } = readBits(mlx5CmdInBits, view);
  const found = Object.entries(FORMATS).find(([, format]) => format.opcode === opcode);
  if (found === undefined) {
    const expected = 'the opcode of a command that makes, changes or queries queues';
    throw invalid('opcode', { where: 'decodeCommand', expected, found: hex(opcode) });
  }
  const [name, format]: readonly [string, CommandFormat] = found;
  if (bytes.byteLength !== format.byteLength) {
    throw invalid('bytes', { where: name, expected: `${format.byteLength} bytes`, found: bytes.byteLength });
  }
  const places = Object.entries(format.parts);
  const strays = strayBits(
    view,
    places.map(([, { layout, at }]) => [layout, at]),
  );
  return {
    name: name as CommandName,
    parts: Object.fromEntries(places.map(([part, { layout, at }]) => [part, readBits(layout, view, at)])),
    violations: strays.map(({ offset, bits }) => ({
      offset,
      field: 'reserved bits',
      expected: '0',
      found: hex(bits, 8),
    })),
  };
}

/** How a command went. Throws `EP_INVALID_ARGUMENT` for fewer than 16 bytes. */
export function decodeCommandResult(bytes: Uint8Array): BitValues<typeof mlx5CmdOutBits> {
  if (bytes.byteLength < 16)
    throw new EpError('EP_INVALID_ARGUMENT', `an answer has at least 16 bytes, found ${bytes.byteLength}`);
  return readBits(mlx5CmdOutBits, new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength));
}
