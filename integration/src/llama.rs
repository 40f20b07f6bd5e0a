//! The demo's server: llama.cpp with Gemma 3 270M as an OCI image, and a client that asks it one fixed greedy question.

use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use serde_json::{Value, json};

use crate::ctr::{Ctr, Launch, Plugins};
use crate::http::{self, Answer};
use crate::image::{self, Layer};
use crate::{netns, node};

/// The reference of the server's image.
pub const IMAGE: &str = "demo.local/llama:1";
/// Where the server listens, in the container's own network namespace.
const SERVER: ([u8; 4], u16) = ([127, 0, 0, 1], 8080);
/// The question of every measurement; always answered greedily.
pub const PROMPT: &str = "The capital of France is Paris. The capital of Italy is";
/// Tokens of an answer that is compared.
pub const ANSWER_TOKENS: u32 = 24;
/// How long a server may take to answer, loading included.
const LIMIT: Duration = Duration::from_secs(60);

/// Writes the server's image to `archive`: `llama-server` of the node, its libraries and its processor back ends. The model is not in it.
pub fn write_image(archive: &Path) -> Result<()> {
    let backends = std::fs::read_dir("/usr/lib/x86_64-linux-gnu/ggml/backends0")
        .context("cannot list ggml's back ends")?;
    let mut programs = backends.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    programs.push("/usr/bin/llama-server".into());
    let mut layer = Layer::new();
    layer.programs(&programs)?;
    layer.directory("/models");
    let cores = std::thread::available_parallelism()?.to_string();
    let config = json!({
        "Entrypoint": ["/usr/bin/llama-server"],
        // Weights go to anonymous memory in the checkpoint's own layout; a small context keeps the key-value cache small.
        "Cmd": ["-m", "/models/gemma-3-270m-q4_k_m.gguf", "--load-mode", "none", "--no-repack", "--host", "127.0.0.1", "--port", "8080",
            "--threads", cores, "--threads-http", "2", "--parallel", "1", "--ctx-size", "1024", "--cache-ram", "0", "--no-ui"],
        "Env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"],
        "WorkingDir": "/",
    });
    image::write(archive, IMAGE, &layer, &config)
}

/// An ordinary `ctr run` of the server, or of a capsule made from it: the model's directory is bound read-only at `/models`, standard output
/// and error go to `log`.
pub fn launch<'a>(plugins: Plugins, image: &'a str, id: &'a str, log: &Path) -> Result<Launch<'a>> {
    let model = node::model();
    let models = model.parent().ok_or_else(|| anyhow!("the model has no directory"))?;
    let models = models.canonicalize().with_context(|| format!("cannot find {}", models.display()))?;
    Ok(Launch::new(plugins, image, id)
        .read_only_bind(&models, "/models")
        .flags(["--log-uri".to_owned(), format!("file://{}", log.display())]))
}

/// A streamed answer and when it came.
#[derive(Debug, Clone)]
pub struct Spoken {
    /// The generated text.
    pub text: String,
    /// When the first token arrived.
    pub first: Instant,
    /// When the last token arrived.
    pub last: Instant,
    /// Tokens that arrived.
    pub tokens: u32,
}

impl Spoken {
    /// Generated tokens per second, the first one's prompt processing not counted.
    pub fn tokens_per_second(&self) -> f64 {
        f64::from(self.tokens.saturating_sub(1)) / (self.last - self.first).as_secs_f64()
    }
}

/// An answer of a server that was just started, and when things happened, from just before the start.
#[derive(Debug, Clone)]
pub struct FirstWords {
    /// The answer.
    pub spoken: Spoken,
    /// The client's start command was over: the container runs.
    pub started: Duration,
    /// The first token arrived.
    pub first_token: Duration,
}

/// Starts `start` (a `ctr run -d`, a `ctr containers restore`) and asks the server of container `id`.
pub fn first_words(ctr: &Ctr, id: &str, start: impl FnOnce() -> Result<()>) -> Result<FirstWords> {
    let begin = Instant::now();
    start()?;
    let started = begin.elapsed();
    let spoken = ask(ctr.init_pid(id)?, ANSWER_TOKENS);
    let spoken = spoken.with_context(|| format!("no answer from container {id}"))?;
    let first_token = spoken.first - begin;
    Ok(FirstWords { spoken, started, first_token })
}

/// Asks the server whose first process is `pid` for exactly `tokens` tokens; waits until it listens and has loaded its model.
pub fn ask(pid: u32, tokens: u32) -> Result<Spoken> {
    let request = json!({"prompt": PROMPT, "n_predict": tokens, "temperature": 0, "seed": 1, "stream": true, "cache_prompt": false, "ignore_eos": true});
    let request = request.to_string();
    netns::within(pid, || {
        let deadline = Instant::now() + LIMIT;
        loop {
            match http::post_json(SocketAddr::from(SERVER), "/completion", &request) {
                Ok(answer) if answer.status == 200 => return listen(answer),
                Ok(answer) if answer.status != 503 => {
                    let status = answer.status;
                    bail!("the server answered {status}: {}", answer.text()?);
                }
                Ok(_) => {}
                Err(error) if Instant::now() > deadline => {
                    return Err(error.context(format!("gave up after {} s", LIMIT.as_secs())));
                }
                Err(_) if !Path::new(&format!("/proc/{pid}/exe")).exists() => {
                    bail!("the server is gone: its first process, {pid}, ended")
                }
                Err(_) => {}
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    })
}

/// Reads a stream of server-sent events, one token each.
fn listen(mut answer: Answer) -> Result<Spoken> {
    let mut text = String::new();
    let mut arrivals = Vec::new();
    while let Some(line) = answer.line()? {
        let Some(event) = line.strip_prefix("data: ") else { continue };
        let event: Value =
            serde_json::from_str(event).with_context(|| format!("the server sent {event:?}"))?;
        if event["stop"] == true {
            let first =
                arrivals.first().copied().ok_or_else(|| anyhow!("the server stopped without a token"))?;
            let tokens = u32::try_from(arrivals.len())?;
            let last = arrivals[arrivals.len() - 1];
            return Ok(Spoken { text, first, last, tokens });
        }
        arrivals.push(Instant::now());
        text.push_str(event["content"].as_str().ok_or_else(|| anyhow!("an event without content: {event}"))?);
    }
    bail!("the server's answer broke off after {} tokens: {text:?}", arrivals.len())
}
