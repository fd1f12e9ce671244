-- Random prompts for POST /generate:
--
--   wrk -t2 -c400 -d60s --timeout 60s -s bench/wrk/post.lua http://127.0.0.1:8080 [-- WORDS [TOKENS]]
--
-- WORDS: random words of each prompt (default 16). TOKENS: at most so many generated (default 16).
-- wrk's own numbers mix answers with refusals. Those printed at the end do not: an answer is 200, a refusal is 503
-- with Retry-After, anything else failed, and so did what wrk counts as errors of sockets.

local threads = {}

-- In wrk's main thread, once for each of its threads.
function setup(thread)
  table.insert(threads, thread)
  thread:set("seed", #threads)
end

-- In each thread, before it sends anything. Globals, because done() asks for them by name.
function init(args)
  math.randomseed(seed)
  words = tonumber(args[1]) or 16
  tokens = tonumber(args[2]) or 16
  answered, refused, failed, shown = 0, 0, 0, ""
  wrk.method = "POST"
  wrk.path = "/generate"
  wrk.headers["Content-Type"] = "application/json"
end

local function word()
  local letters = {}
  for i = 1, math.random(2, 7) do
    letters[i] = string.char(math.random(97, 122))
  end
  return table.concat(letters)
end

function request()
  local prompt = {}
  for i = 1, words do
    prompt[i] = word()
  end
  local body = string.format('{"prompt": "%s", "max_new_tokens": %d}', table.concat(prompt, " "), tokens)
  return wrk.format(nil, nil, nil, body)
end

local function has_retry_after(headers)
  for name in pairs(headers) do
    if name:lower() == "retry-after" then
      return true
    end
  end
  return false
end

function response(status, headers, body)
  if status == 200 then
    answered = answered + 1
  elseif status == 503 and has_retry_after(headers) then
    refused = refused + 1
  else
    failed = failed + 1
    if shown == "" then
      shown = status .. " " .. body:sub(1, 200):gsub("%c", " ")
    end
  end
end

function done(summary, latency, requests)
  local sums = {answered = 0, refused = 0, failed = 0}
  for _, thread in ipairs(threads) do
    for name in pairs(sums) do
      sums[name] = sums[name] + thread:get(name)
    end
    if thread:get("shown") ~= "" then
      io.stderr:write("failed: " .. thread:get("shown") .. "\n")
    end
  end
  local errors = summary.errors
  local sockets = errors.connect + errors.read + errors.write + errors.timeout
  print(string.format(
    '{"ok": %d, "refused": %d, "failed": %d, "socket_errors": %d, "seconds": %.3f}',
    sums.answered, sums.refused, sums.failed, sockets, summary.duration / 1e6
  ))
end
