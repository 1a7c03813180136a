// What a host that was given is: the address by which it reaches the other one, and whether there is a fabric.
import { createSocket } from 'node:dgram';
import { once } from 'node:events';
import { nvshmem } from '@ep/nvshmem';

const [other] = process.argv.slice(2);
const socket = createSocket('udp4');
// Nothing is sent.
socket.connect(9, other);
await once(socket, 'connect');
const { address } = socket.address();
socket.close();
const probe = await nvshmem.fabric.probe({ address });
process.send({ address, missing: probe.available ? '' : probe.reason });
process.disconnect();
