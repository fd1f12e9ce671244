// The openai SDK for Node, unchanged: chat, streams, tools, structured output, embeddings and errors.
// Usage: node openai_node.mjs BASE_URL   (beside a node_modules that holds `openai`)
import OpenAI from 'openai';

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: 'none', maxRetries: 0, timeout: 60_000 });
const model = 'hummingbird-13m';
const messages = [{ role: 'user', content: 'What is the capital of Norway?' }];
const oslo = 'The capital of Norway is Oslo.';

function check(name, good) {
  console.log(`  ${good ? 'ok  ' : 'FAIL'} ${name}`);
  if (!good) process.exit(1);
}

const models = await client.models.list();
check('models.list', models.data[0].id === model);

const answer = await client.chat.completions.create({ model, messages, temperature: 0 });
check('chat.completions.create', answer.choices[0].message.content === oslo && answer.usage.completion_tokens === 9);

let streamed = '';
let usage = null;
const stream = await client.chat.completions.create({
  model, messages, temperature: 0, stream: true, stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  streamed += chunk.choices[0]?.delta?.content ?? '';
  usage = chunk.usage ?? usage;
}
check('a stream of chat', streamed === oslo && usage.completion_tokens === 9);

const parameters = { type: 'object', properties: { city: { type: 'string' } }, required: ['city'] };
const tool = { type: 'function', function: { name: 'get_time', description: 'Get the local time in a city.', parameters } };
const asked = [{ role: 'user', content: 'What time is it in Helsinki?' }];
const called = await client.chat.completions
  .stream({ model, messages: asked, tools: [tool], temperature: 0 })
  .finalChatCompletion();
const call = called.choices[0].message.tool_calls[0];
const sound = call.function.name === 'get_time' && JSON.parse(call.function.arguments).city === 'Helsinki';
check('a streamed tool call', sound && called.choices[0].finish_reason === 'tool_calls');

const runner = client.chat.completions.runTools({
  model, messages: asked, temperature: 0,
  tools: [{ ...tool, function: { ...tool.function, parse: JSON.parse, function: () => ({ time: '20:59' }) } }],
});
check('runTools', (await runner.finalContent()) === 'It is 20:59 in Helsinki.');

const schema = {
  type: 'object', properties: { rank: { type: 'integer', minimum: 1, maximum: 9 } }, required: ['rank'],
  additionalProperties: false,
};
const parsed = await client.chat.completions.parse({
  model, messages, response_format: { type: 'json_schema', json_schema: { name: 'rank', schema, strict: true } },
});
check('chat.completions.parse', parsed.choices[0].message.parsed.rank > 0);

const text = await client.completions.create({ model, prompt: 'The capital of', max_tokens: 3, temperature: 0 });
check('completions.create', text.choices[0].text.length > 0);

const both = await Promise.all([1, 2, 3].map(() => client.chat.completions.create({ model, messages, temperature: 0 })));
check('several at once', both.every((one) => one.choices[0].message.content === oslo));

const plain = await client.embeddings.create({ model, input: ['Oslo', 'Rome'], encoding_format: 'float' });
const coded = await client.embeddings.create({ model, input: ['Oslo', 'Rome'] }); // base64 on the wire
const same = plain.data.every((one, i) => one.embedding.every((value, j) => value === coded.data[i].embedding[j]));
check('embeddings.create', plain.data.length === 2 && same);

try {
  await client.chat.completions.create({ model: 'gpt-4o', messages });
  check('NotFoundError', false);
} catch (error) {
  check('NotFoundError', error instanceof OpenAI.NotFoundError && error.code === 'model_not_found');
}
