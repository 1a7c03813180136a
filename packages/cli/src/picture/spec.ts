/** The drawing itself, as a Vega-Lite specification. */
import type { TopLevelSpec } from 'vega-lite';
import type { Band, LoadBar, TrafficCell } from './data.js';

export interface PictureData {
  readonly title: string;
  readonly bands: readonly Band[];
  readonly traffic: readonly TrafficCell[];
  readonly load: readonly LoadBar[];
  readonly imbalanceBefore: number;
  readonly imbalanceAfter: number;
}

/** Dark on an own light ground, which goes with the file: an SVG does not know whether its viewer is light or dark. */
const ink = '#1f2933';
const faint = '#9aa5b1';
const ground = '#ffffff';
const before = '#e8853a';
const after = '#2f6fb5';
const sent: readonly string[] = ['#f2f6fb', '#c6dbef', '#6baed6', '#2f6fb5', '#0b3c73'];
const own = '#e4e7eb';

/** Side of the matrix, and of the bars beside it. */
const side = 380;
const smallestCell = 6;
const labelledBands = 16;

export function pictureSpec(data: PictureData): TopLevelSpec {
  const count = data.bands.length;
  const step = Math.max(smallestCell, Math.min(84, Math.floor(side / count)));
  const labels = data.bands.map((band) => band.label);
  const kept = Math.ceil(count / labelledBands);
  const shown = labels.filter((_, i) => i % kept === 0);
  const axis = { values: shown, labelAngle: 0, labelOverlap: true, ticks: false, domain: false } as const;
  const largest = Math.max(1, ...data.traffic.filter((cell) => !cell.local).map((cell) => cell.bytes));
  const darkFrom = largest * 0.55;
  const cellText = step >= 34;
  const anySent = data.traffic.some((cell) => !cell.local && cell.bytes > 0);
  const anyLocal = data.traffic.some((cell) => cell.local);
  const matrix = {
    title: {
      text: 'bytes sent, forward pass',
      subtitle: anyLocal
        ? 'row sends to column; grey: stays on its rank'
        : 'row sends to column; what stays on its rank is left out',
    },
    width: { step },
    height: { step },
    data: { values: [...data.traffic] },
    encoding: {
      x: { field: 'to', type: 'ordinal', sort: labels, title: 'to rank', axis: { ...axis, orient: 'bottom' } },
      y: { field: 'from', type: 'ordinal', sort: labels, title: 'from rank', axis },
    },
    layer: [
      {
        transform: [{ filter: '!datum.local' }],
        mark: { type: 'rect', stroke: ground, strokeWidth: count > 32 ? 0.5 : 1.5 },
        encoding: {
          color: {
            field: 'bytes',
            type: 'quantitative',
            scale: { domain: [0, largest], range: [...sent], interpolate: 'rgb' },
            legend: !anySent
              ? null
              : {
                  title: 'bytes',
                  format: '.2~s',
                  orient: 'right',
                  gradientLength: Math.min(160, Math.max(80, step * count - 40)),
                  tickCount: 4,
                },
          },
        },
      },
      {
        transform: [{ filter: 'datum.local' }],
        mark: { type: 'rect', color: own, stroke: ground, strokeWidth: count > 32 ? 0.5 : 1.5 },
      },
      ...(cellText
        ? [
            {
              mark: { type: 'text', fontSize: Math.max(10, Math.min(14, Math.floor(step / 4))) },
              encoding: {
                text: { field: 'text', type: 'nominal' },
                color: {
                  condition: { test: `!datum.local && datum.bytes > ${darkFrom}`, value: ground },
                  value: ink,
                },
              },
            },
          ]
        : []),
    ],
  };
  const pairs = count <= 24;
  const bars = {
    title: {
      text: 'attention work per rank over average',
      subtitle: `largest: ${data.imbalanceBefore.toFixed(3)} at home, ${data.imbalanceAfter.toFixed(3)} as planned`,
    },
    width: pairs ? Math.max(260, count * 34) : 520,
    height: Math.max(200, step * count),
    data: { values: [...data.load] },
    layer: [
      {
        mark: { type: 'bar', ...(count > 32 ? { cornerRadiusEnd: 0 } : { cornerRadiusEnd: 2 }) },
        encoding: {
          x: {
            field: 'rank',
            type: 'ordinal',
            sort: labels,
            title: 'rank',
            axis: { ...axis, domain: true },
            scale: { paddingInner: pairs ? 0.25 : 0.1 },
          },
          xOffset: { field: 'plan', sort: ['at home', 'as planned'] },
          y: { field: 'load', type: 'quantitative', title: null, axis: { tickCount: 5, domain: false, ticks: false } },
          color: {
            field: 'plan',
            type: 'nominal',
            sort: ['at home', 'as planned'],
            scale: { domain: ['at home', 'as planned'], range: [before, after] },
            legend: { title: null, orient: 'bottom', direction: 'horizontal', offset: 4 },
          },
        },
      },
      {
        mark: { type: 'rule', strokeDash: [4, 3], color: ink, strokeWidth: 1 },
        encoding: { y: { datum: 1 } },
      },
    ],
  };
  const spec: unknown = {
    $schema: 'https://vega.github.io/schema/vega-lite/v6.json',
    background: ground,
    padding: 20,
    title: { text: data.title, anchor: 'start', fontSize: 16, fontWeight: 600, offset: 18, color: ink },
    config: {
      font: 'ui-sans-serif, system-ui, Helvetica, Arial, sans-serif',
      view: { stroke: null },
      title: {
        color: ink,
        subtitleColor: '#52606d',
        fontSize: 13,
        subtitleFontSize: 12,
        anchor: 'start',
        fontWeight: 600,
      },
      axis: {
        labelColor: ink,
        titleColor: ink,
        gridColor: '#e4e7eb',
        domainColor: faint,
        labelFontSize: 11,
        titleFontSize: 12,
        titleFontWeight: 400,
      },
      legend: { labelColor: ink, titleColor: ink, labelFontSize: 11, titleFontSize: 11, titleFontWeight: 400 },
    },
    spacing: 48,
    resolve: { scale: { color: 'independent', x: 'independent', y: 'independent' } },
    hconcat: [matrix, bars],
  };
  return spec as TopLevelSpec;
}
