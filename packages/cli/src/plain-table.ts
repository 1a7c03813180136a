/** Tables without lines. */
import Table from 'cli-table3';

const none = '';
const chars = {
  top: none,
  'top-mid': none,
  'top-left': none,
  'top-right': none,
  bottom: none,
  'bottom-mid': none,
  'bottom-left': none,
  'bottom-right': none,
  left: '  ',
  'left-mid': none,
  mid: none,
  'mid-mid': none,
  right: none,
  'right-mid': none,
  middle: '  ',
};

export function plainTable(colAligns: readonly ('left' | 'right')[] = []): Table.Table {
  return new Table({
    chars,
    style: { 'padding-left': 0, 'padding-right': 0, head: [], border: [] },
    colAligns: [...colAligns],
  });
}
