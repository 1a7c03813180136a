/**
 * `nvshmem.nvshmem` whose memory is device memory unless asked otherwise, with views of it: over the stand-ins a GPU's memory is the host's. So the cases of the conformance suite, which look at memory by
 * views, run over NVSHMEM's calls instead of over the host memory beside them.
 */
import { checkInteger, elementBytes, invalid, viewStorage } from '@ep/core';
import { native } from '@ep/native';
import { nvshmem } from '@ep/nvshmem';

const LARGEST_VIEW = 2 ** 32;

function withViews(transport, memory) {
  const { byteLength } = memory;
  let bytes;
  memory.view = (dtype, byteOffset, length) => {
    const native = memory.nativeMemory('view');
    const width = elementBytes(dtype);
    checkInteger(length, 'length', 'view', 0, LARGEST_VIEW);
    checkInteger(byteOffset, 'byteOffset', 'view', 0, byteLength);
    checkInteger(length * width, 'byteLength', 'view', 0, byteLength - byteOffset);
    if (byteOffset % width !== 0) {
      throw invalid('byteOffset', { where: 'view', expected: `a multiple of ${width}`, found: byteOffset });
    }
    bytes ??= transport.nativeWorld('view').window(native);
    return viewStorage(dtype, bytes, byteOffset, length);
  };
  const close = memory.close.bind(memory);
  memory.close = async (options) => {
    await close(options);
    if (bytes !== undefined) native().binding.detach(bytes);
  };
  return memory;
}

export const provider = {
  name: nvshmem.nvshmem.name,
  probe: nvshmem.nvshmem.probe,
  async open(member, options) {
    const transport = await nvshmem.nvshmem.open(member, options);
    const { allocate } = transport;
    // `allocate` is the transport's own property.
    Object.defineProperty(transport, 'allocate', {
      value: async (asked) => {
        return withViews(transport, await allocate({ ...asked, space: asked?.space ?? 'device' }));
      },
    });
    return transport;
  },
};
