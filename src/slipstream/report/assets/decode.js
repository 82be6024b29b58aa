// Arrays as report/codec.py writes them: planes of bytes, deflated, in base 64.

async function inflate(text) {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function int64FromPlanes(planes, n) {
  const values = new Float64Array(n); // exact up to 2^53: microseconds of 285 years
  for (let i = 0; i < n; i++) {
    const low = (planes[i] | (planes[n + i] << 8) | (planes[2 * n + i] << 16) | (planes[3 * n + i] << 24)) >>> 0;
    const high = planes[4 * n + i] | (planes[5 * n + i] << 8) | (planes[6 * n + i] << 16) | (planes[7 * n + i] << 24);
    values[i] = high * 4294967296 + low;
  }
  return values;
}

function float32FromPlanes(planes, n) {
  const bytes = new Uint8Array(4 * n);
  for (let i = 0; i < n; i++) for (let plane = 0; plane < 4; plane++) bytes[4 * i + plane] = planes[plane * n + i];
  return new Float32Array(bytes.buffer);
}

async function decodeColumn(column) {
  const planes = await inflate(column.z);
  if (column.t === "u8") return planes;
  if (column.t === "f32") return float32FromPlanes(planes, column.n);
  const values = int64FromPlanes(planes, column.n);
  if (column.t === "d64") for (let i = 1; i < column.n; i++) values[i] += values[i - 1];
  return values;
}
