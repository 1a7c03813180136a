// Where no platform package fits this machine: imports work, and whatever needs the addon says what was looked for and what to do.
import { isEpError } from '@ep/core';
import { allocateHost } from '@ep/native';

try {
  allocateHost(4096);
  throw new Error('memory of an addon that is not installed');
} catch (error) {
  if (!isEpError(error)) throw error;
  console.log(JSON.stringify({ code: error.code, message: error.message, context: error.context }));
}
