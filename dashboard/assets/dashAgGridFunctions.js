/* How tables write numbers; the same as rankscope.analysis.text.units. */
"use strict";
(() => {
  const functions = (window.dashAgGridFunctions = window.dashAgGridFunctions || {});
  const scaled = (value, units) => {
    if (value === null || value === undefined || !Number.isFinite(value)) return "";
    if (value === 0) return "0";
    const [unit, size] = units.find(([, least]) => Math.abs(value) >= least * 0.9995) || units[units.length - 1];
    const number = value / size;
    const shown = size === 1 ? number.toFixed(0) : Math.abs(number) >= 99.95 ? number.toFixed(0) : number.toPrecision(3);
    return `${shown} ${unit}`;
  };
  const BYTES = [["GB", 1e9], ["MB", 1e6], ["kB", 1e3], ["B", 1]];
  functions.rankscope_time = (ns) => scaled(ns, [["s", 1e9], ["ms", 1e6], ["µs", 1e3], ["ns", 1]]);
  functions.rankscope_bytes = (bytes) => scaled(bytes, BYTES);
  functions.rankscope_rate = (rate) => (rate === null || rate === undefined ? "" : `${scaled(rate, BYTES)}/s`);
  const FLOPS = [["PFLOP", 1e15], ["TFLOP", 1e12], ["GFLOP", 1e9], ["MFLOP", 1e6], ["FLOP", 1]];
  functions.rankscope_flops = (flops) => scaled(flops, FLOPS);
  functions.rankscope_flops_rate = (rate) => (rate === null || rate === undefined ? "" : `${scaled(rate, FLOPS)}/s`);
  functions.rankscope_share = (share) => {
    if (share === null || share === undefined) return "";
    if (share !== 0 && Math.abs(share) < 0.001) return "< 0.1 %";
    if (share > 0.999 && share < 1) return "> 99.9 %";
    const percent = (share > 0.99 && share < 1 ? Math.floor(share * 1000) : share * 1000) / 10;
    return `${percent.toFixed(percent === 0 || Math.abs(percent) >= 99.95 ? 0 : 1)} %`;
  };
})();
