"""A server of chat completions for tests: real HTTP on this machine, a real chat template, scripted faults, no model.

What it answers is a function of the prompt's tokens, as a greedy model's answer is. It speaks like vLLM, like SGLang, or like a
server that gives no token ids; and it takes earlier thoughts under the one name that each of them reads.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from slipstream.corpus.chat import ChatEncoder
from slipstream.corpus.conversation import Message

SPECIALS = ["<mask>", "<|im_start|>", "<|im_end|>"]
STOP = 2
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and m.reasoning_content and (loop.last or keep_thoughts) %}"
    "<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Drops the thoughts of earlier answers, unless it is told to keep them."""


def write_target(folder: Path, *, template: str = TEMPLATE, positions: int = 1024) -> Path:
    """A target's folder without weights: a tokenizer of one token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate([*SPECIALS, *alphabet])}, merges=[]))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=SPECIALS[STOP], additional_special_tokens=SPECIALS)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4}
    config = {"model_type": "llama", **sizes, "max_position_embeddings": positions, "eos_token_id": STOP}
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": len(SPECIALS) + len(alphabet)}))
    return folder


class StubServer:
    """The server, a context. `fault` is told the number of a request (from 1) and its body, and names what goes wrong with it.

    `style` is "vllm", "sglang" or "plain". `slow` is the seconds that a request takes, by its number.
    """

    def __init__(
        self,
        folder: Path,
        *,
        style: str = "vllm",
        name: str = "tiny",
        think: bool = False,
        fault: Callable[[int, dict[str, Any]], str | None] = lambda number, body: None,
        slow: Callable[[int], float] = lambda number: 0.0,
        port: int = 0,
    ) -> None:
        self.style, self.name, self.think, self.fault, self.slow = style, name, think, fault, slow
        self.root = str(folder)
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.most_at_once = 0
        self._folder, self._at_once = folder, 0
        self._lock, self._tokenizing = threading.Lock(), threading.Lock()
        self._encoders: dict[str, ChatEncoder] = {}
        self._http = _Http(("127.0.0.1", port), type("Handler", (_Handler,), {"stub": self}))
        self.port: int = self._http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> StubServer:
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def asked(self) -> list[str]:
        """The last user's words of each request, in the order that they came."""
        return [body["messages"][-1]["content"] for body in self.bodies]

    def chat(self, handler: _Handler, body: dict[str, Any]) -> None:
        """Answer one request, or do what the script says."""
        with self._lock:
            self.bodies.append(body)
            self.headers.append({name.lower(): value for name, value in handler.headers.items()})
            number = len(self.bodies)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        time.sleep(self.slow(number))
        fault = self.fault(number, body)
        with self._lock:
            self._at_once -= 1
        if fault is None:
            handler.send(200, self._completion(body))
        elif fault == "disconnect":
            handler.close_connection = True
            handler.connection.close()
        elif fault == "garbage":
            handler.send(200, "<html>a proxy</html>")
        elif fault == "torn":
            handler.send(200, self._completion(body), share=0.5)
        else:
            handler.send(int(fault), {"error": {"message": f"scripted {fault}"}})

    def _completion(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt_ids = self.prompt_ids(body)
        content = f"answer {hashlib.sha256(str(prompt_ids).encode()).hexdigest()[:6]} to: {body['messages'][-1]['content']}"
        thought = f"a thought of {len(prompt_ids)}" if self.think else ""
        raw = f"<think>\n{thought}\n</think>\n\n{content}" if thought else content
        with self._tokenizing:
            ids = [*self._encoder(body)._tokenize([raw])[0], STOP]
        cut = len(ids) > body["max_tokens"]
        ids = ids[: body["max_tokens"]]
        if cut:
            content = content[: len(ids) - (len(raw) - len(content))] if len(ids) > len(raw) - len(content) else ""
        message = {"role": "assistant", "content": content}
        if thought:
            message["reasoning" if self.style == "vllm" else "reasoning_content"] = thought
        choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": "length" if cut else "stop"}
        answer: dict[str, Any] = {"choices": [choice], "usage": {"prompt_tokens": len(prompt_ids)}}
        if self.style == "vllm":
            choice["token_ids"], answer["prompt_token_ids"] = ids, prompt_ids
        elif self.style == "sglang":
            # Names the stop token apart, and may leave it out of the ids.
            choice["token_ids"], choice["prompt_token_ids"] = ids if cut else ids[:-1], prompt_ids
            choice["matched_stop"] = None if cut else STOP
        return answer

    def prompt_ids(self, body: dict[str, Any]) -> list[int]:
        """What this server's own template makes of a request."""
        read = "reasoning" if self.style == "vllm" else "reasoning_content"
        messages = [
            Message(m["role"], m["content"], fields={"reasoning_content": m[read]} if read in m else {})
            for m in body["messages"]
        ]
        with self._tokenizing:
            return self._encoder(body).encode_prompt(messages)

    def _encoder(self, body: dict[str, Any]) -> ChatEncoder:
        arguments = body.get("chat_template_kwargs", {})
        key = json.dumps(arguments, sort_keys=True)
        if key not in self._encoders:
            self._encoders[key] = ChatEncoder(self._folder, template_arguments=arguments)
        return self._encoders[key]

    def models(self) -> dict[str, Any]:
        """What `/v1/models` says."""
        return {"data": [{"id": self.name, "root": self.root, "max_model_len": 512}]}


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that is gone is what some tests are about."""


class _Handler(BaseHTTPRequestHandler):
    stub: StubServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self.send(200, self.stub.models()) if self.path == "/v1/models" else self.send(404, {"error": "no such page"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/chat/completions":
            self.send(404, {"error": "no such page"})
            return
        self.stub.chat(self, body)

    def send(self, status: int, content: object, *, share: float = 1.0) -> None:
        """Send JSON, or text as it is; only a share of it, and then no more, when asked."""
        raw = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        if status == 429:
            self.send_header("Retry-After", "0")
        self.end_headers()
        with suppress(OSError):
            self.wfile.write(raw[: int(len(raw) * share)])
        if share < 1:
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""
