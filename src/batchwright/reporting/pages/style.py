"""The style sheet of all pages, for screen, phone and paper, in light and dark mode.

Colours with a meaning are those of Okabe and Ito, darkened on white and lightened on black for
contrast; no meaning depends on colour alone.
"""

STYLE = """
:root { color-scheme: light dark;
  --paper: #ffffff; --raised: #f6f7f9; --ink: #1b1f24; --soft: #57606a; --edge: #d8dee4;
  --accent: #00598c; --blue: #0072b2; --orange: #b87a00; --green: #007a5a; --red: #c44f00;
  --purple: #b0589a; --grey: #6e7781; --pale: #b6bcc4; --amber: #e69f00; --yellow: #e8d61f;
  --sky: #56b4e9; }
@media (prefers-color-scheme: dark) { :root {
  --paper: #14171c; --raised: #1d2229; --ink: #e8ebef; --soft: #a3adb8; --edge: #353c46;
  --accent: #7cc4f0; --blue: #56b4e9; --orange: #e69f00; --green: #2fc199; --red: #f2864a;
  --purple: #d98fbd; --grey: #8b949e; --pale: #545d68; --amber: #e69f00; --yellow: #f0e442;
  --sky: #bfe2f8; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main, footer { max-width: 1080px; margin: 0 auto; padding: 0 20px; }
header { padding-top: 32px; }
.kicker { margin: 0; color: var(--soft); font-size: 14px; }
h1 { margin: 0 0 20px; font-size: 30px; line-height: 1.2; overflow-wrap: anywhere; }
h2 { margin: 44px 0 14px; padding-top: 14px; border-top: 1px solid var(--edge); font-size: 21px; }
h3 { margin: 24px 0 8px; font-size: 17px; }
p { margin: 10px 0; max-width: 72ch; overflow-wrap: anywhere; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(200px, 1fr)); gap: 12px;
  margin: 0; padding: 0; list-style: none; }
.tiles li { padding: 14px 16px; border-radius: 8px; background: var(--raised);
  border: 1px solid var(--edge); }
.tiles span, .tiles small { display: block; color: var(--soft); font-size: 14px; }
.tiles strong { display: block; margin: 2px 0; font-size: 21px; line-height: 1.3; }
.pair { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 20px 28px; }
@media (max-width: 760px) { .pair { grid-template-columns: minmax(0, 1fr); }
  h1 { font-size: 25px; } table.numbers td { white-space: normal; }
  table.numbers:not(.cards) td:nth-child(2):nth-last-child(2),
  table.numbers:not(.cards) td:nth-child(3):last-child {
    white-space: nowrap; } }
.scroll { position: relative; overflow-x: auto; margin: 0 0 12px; background:
  linear-gradient(to right, var(--paper) 40%, transparent) left / 44px 100% no-repeat local,
  linear-gradient(to left, var(--paper) 40%, transparent) right / 44px 100% no-repeat local,
  linear-gradient(to right, var(--pale), transparent) left / 18px 100% no-repeat scroll,
  linear-gradient(to left, var(--pale), transparent) right / 18px 100% no-repeat scroll; }
table { border-collapse: collapse; width: 100%; font-size: 15px;
  font-variant-numeric: tabular-nums; }
caption { text-align: left; padding: 0 0 6px; color: var(--soft); font-size: 14px; }
th, td { padding: 5px 12px 5px 0; border-bottom: 1px solid var(--edge); text-align: left;
  vertical-align: top; }
th { font-weight: normal; color: var(--soft); }
.numbers td, .numbers thead th + th { text-align: right; padding: 5px 0 5px 12px; }
.numbers th, .numbers td { white-space: nowrap; }
.numbers th { white-space: normal; }
.numbers tbody th { position: sticky; left: 0; background: var(--paper); min-width: 5em; }
.numbers td:nth-child(2):last-child, .numbers .remark { white-space: normal; }
.numbers .remark { min-width: 7em; }
.pair > figure:has(> details[open]) { grid-column: 1 / -1; }
@media (max-width: 600px) { table.cards { display: block; }
  .cards caption, .cards tbody { display: block; }
  .cards thead { position: absolute; width: 1px; height: 1px; overflow: hidden;
    clip-path: inset(50%); }
  .cards tr { display: block; padding: 8px 0; border-bottom: 1px solid var(--edge); }
  .cards tbody th { display: block; position: static; padding: 0; color: var(--ink);
    font-weight: 600; overflow-wrap: anywhere; }
  .numbers.cards td { display: flex; justify-content: space-between; gap: 16px; padding: 2px 0;
    border: 0; white-space: normal; }
  .cards td::before { content: attr(data-label); color: var(--soft); text-align: left; }
  .cards td:empty { display: none; } }
.facts td { overflow-wrap: anywhere; }
.facts th { width: 38%; }
.reasons { margin: 0; padding: 0; list-style: none; }
.reasons li { padding: 6px 0 6px 18px; border-bottom: 1px solid var(--edge);
  overflow-wrap: anywhere; }
.reasons details { margin: 0; }
.reasons summary { margin-left: -18px; color: var(--ink); font-size: inherit; }
.reasons p { margin: 4px 0; color: var(--soft); font-size: 14px; }
.badge { padding: 1px 8px; border: 1px solid var(--accent); border-radius: 10px;
  color: var(--accent); font-size: 13px; white-space: nowrap; }
figure { margin: 0 0 12px; min-width: 0; }
figcaption { font-weight: 600; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 4px 0; padding: 0;
  list-style: none; color: var(--soft); font-size: 14px; }
.legend li { display: flex; align-items: center; gap: 6px; }
.swatch { width: 16px; height: 16px; }
.chart { display: block; width: 100%; height: auto; max-width: 560px; }
.tick { fill: var(--soft); font-size: 12.5px;
  paint-order: stroke; stroke: var(--paper); stroke-width: 3px; }
.axis { fill: var(--ink); font-size: 13.5px; }
.grid { stroke: var(--edge); }
.line { fill: none; stroke-width: 2; }
.line.thin { stroke-width: 1; stroke-opacity: 0.75; }
.ring { fill: none; stroke-width: 2; }
.band { fill-opacity: 0.2; }
.bar { stroke: var(--paper); }
.line.blue { stroke: var(--blue); } .mark.blue, .band.blue { fill: var(--blue); }
.line.orange { stroke: var(--orange); } .mark.orange { fill: var(--orange); }
.line.green { stroke: var(--green); } .mark.green, .band.green { fill: var(--green); }
.line.red { stroke: var(--red); } .mark.red, .band.red { fill: var(--red); }
.line.purple { stroke: var(--purple); } .mark.purple, .band.purple { fill: var(--purple); }
.band.orange { fill: var(--orange); } .mark.star { stroke: var(--paper); }
.line.grey { stroke: var(--grey); stroke-dasharray: 5 4; } .box { stroke: none; }
.mark.grey, .band.grey { fill: var(--grey); } .ring.ink, .line.ink { stroke: var(--ink); }
.mark.hollow { fill: var(--paper); stroke: var(--grey); }
.part-set-up { fill: var(--grey); } .part-input { fill: var(--amber); }
.part-compute { fill: var(--blue); } .part-wait { fill: var(--yellow); }
.part-communication { fill: var(--red); }
.part-evaluation { fill: var(--green); } .part-checkpoints { fill: var(--purple); }
.part-large { fill: var(--blue); } .part-small { fill: var(--sky); }
.part-exchange { fill: var(--red); }
.epoch { stroke: var(--ink); stroke-dasharray: 2 3; }
.note { padding: 8px 14px; border-left: 4px solid var(--accent); background: var(--raised); }
.part-other { fill: var(--pale); }
details { margin: 6px 0; }
summary { color: var(--accent); cursor: pointer; font-size: 14px; }
pre.key-list { columns: 280px; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 8px 0;
  padding: 14px 16px; border-radius: 8px; background: var(--raised); border: 1px solid var(--edge);
  font-size: 14px; }
footer { padding-top: 28px; padding-bottom: 32px; color: var(--soft); font-size: 14px; }
@media print { figure, .tiles, .reasons li { break-inside: avoid; } }
"""
