/** A picture of a plan as SVG text: who sends how much to whom, and each rank's load before and after. */
import type { Explanation } from '@ep/plan';
import { type Band, bandsOf, loadOf, trafficOf } from './data.js';
import { pictureSpec } from './spec.js';

export interface PictureOptions {
  readonly title: string;
  readonly rowBytesQ: number;
  readonly rowBytesKv: number;
}

/** Loads the drawing libraries at the first call: no other command pays for them. */
export async function drawPlan(explanation: Explanation, options: PictureOptions): Promise<string> {
  const [vega, vegaLite] = await Promise.all([import('vega'), import('vega-lite')]);
  const bands: readonly Band[] = bandsOf(explanation.worldSize);
  const spec = pictureSpec({
    title: options.title,
    bands,
    traffic: trafficOf(explanation, bands, options.rowBytesQ, options.rowBytesKv),
    load: loadOf(explanation, bands),
    imbalanceBefore: explanation.imbalanceBefore,
    imbalanceAfter: explanation.imbalanceAfter,
  });
  const view = new vega.View(vega.parse(vegaLite.compile(spec).spec), { renderer: 'none' });
  try {
    return await view.toSVG();
  } finally {
    view.finalize();
  }
}
