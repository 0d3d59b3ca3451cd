// Reading of dropped files: a trace of ddplab, or a file of torch's profiler; JSON, gzipped or not.

/** The model in a file; see modelOfTrace for `gpus`. Throws an error of one line that names the file. */
async function modelInFile(file, gpus) {
  try {
    return modelOfTrace(await traceInFile(file), gpus);
  } catch (error) {
    throw new Error(`${file.name}: ${describe(error)}`);
  }
}

/** The JSON document of the trace in a file. */
async function traceInFile(file) {
  const document = JSON.parse(await textOf(file));
  return Array.isArray(document?.traceEvents) ? traceOfProfile(document, file.name) : document;
}

async function textOf(file) {
  const bytes = new Uint8Array(await file.arrayBuffer());
  if (bytes[0] !== 0x1f || bytes[1] !== 0x8b) return new TextDecoder().decode(bytes);
  const unzipped = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(unzipped).text();
}

function describe(error) {
  if (error instanceof SyntaxError) return `expected JSON, got something else: ${error.message}`;
  if (error instanceof TypeError) return `expected an undamaged trace or profile, got one that cannot be read: ${error.message}`;
  return error.message;
}
