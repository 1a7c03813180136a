// Stands for `scontrol show hostnames <list>`: a prefix and one range, as the suites have it.
const [show, hostnames, list = ''] = process.argv.slice(2);
const [, prefix, first, last] = /^([\w.-]+)\[(\d+)-(\d+)\]$/.exec(list) ?? [];
if (show !== 'show' || hostnames !== 'hostnames' || prefix === undefined)
  throw new Error(`the stand-in for scontrol cannot: ${process.argv.slice(2).join(' ')}`);
for (let host = Number(first); host <= Number(last); host++) console.log(`${prefix}${host}`);
