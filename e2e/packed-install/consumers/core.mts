import { createStorage, type DType, decode, EpError, encode, isEpError, type Scope } from '@ep/core';

const dtype: DType = 'bf16';
const coded = encode(dtype, [1, -2.5, 0]);
if (coded.BYTES_PER_ELEMENT !== 2) throw new Error(`bf16 has ${coded.BYTES_PER_ELEMENT} bytes`);
const back: Float32Array = decode(dtype, coded);
if (back.join() !== '1,-2.5,0') throw new Error(`bf16 gave back ${back}`);
if (createStorage('i64', 3).length !== 3) throw new Error('storage has another length than asked for');

const error = new EpError('EP_CLOSED', 'the sample is closed', { context: { sample: 1 } });
const scope: Scope = error.scope;
if (scope !== 'call' || !isEpError(error)) throw new Error(`EP_CLOSED has scope ${scope}`);
console.log('used');
