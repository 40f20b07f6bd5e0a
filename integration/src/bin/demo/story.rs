//! The story, step by step. Every step fails loudly, with its number and name.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use coldsnap_integration::ctr::{COLDSNAP, Plugins, STOCK};
use coldsnap_integration::llama::{self, FirstWords};
use coldsnap_integration::memory::{self, drop_caches};
use coldsnap_integration::node::{self, Node, With, bytes_below, program};
use coldsnap_integration::{netns, process};

use crate::report::{Capture, Machine, Peer, Replica, Report, TokensPerSecond, median, megabytes};

const CAPSULE: &str = "demo.local/llm-capsule:1";
const PEER_CHECKPOINT: &str = "demo.local/llm-checkpoint:1";
const PAYLOADS: &str = "/var/lib/coldsnap/model-payloads";
/// Tokens of a generation whose speed is measured.
const LONG_ANSWER: u32 = 200;

/// A node, the report that grows, and what the steps share.
struct Story {
    node: Node,
    report: Report,
    log: PathBuf,
    /// Bytes on the node's disk before the first capture.
    stored_before: u64,
}

/// One run of a measurement.
struct Run {
    first_token_ms: f64,
    /// The client's command was over.
    started_ms: f64,
    /// Of a long answer, if one was asked for.
    tokens_per_second: Option<f64>,
}

/// Tells the whole story with `repetitions` runs of each measurement.
pub fn tell(repetitions: usize) -> Result<Report> {
    let mut story =
        step(1, "a node with containerd, our snapshotter and our shim", || Story::begin(repetitions))?;
    step(2, "llama-server with Gemma 3 270M, started from its image", || story.cold_start())?;
    step(3, "capture it into a capsule image", || story.capture())?;
    step(4, "start the capsule: the server comes back", || story.restore())?;
    step(5, "three more replicas from the same capsule", || story.replicas())?;
    step(6, "the peer: ctr containers checkpoint and restore, on containerd's own runtime", || story.peer())?;
    step(7, "all of it again, interleaved, page cache warm and dropped", || story.measure())?;
    step(8, "two more captures: of a new server and of a restored one", || story.capture_again())?;
    step(9, "nothing is left behind", || story.node.assert_clean())?;
    let mut report = story.report;
    // Any other answer would have ended the story.
    report.answers_equal = true;
    report.print_comparison();
    println!();
    report.print_expectations();
    Ok(report)
}

fn step<T>(number: u32, what: &str, act: impl FnOnce() -> Result<T>) -> Result<T> {
    println!("\n{number}. {what}");
    act().with_context(|| format!("step {number}, {what}"))
}

fn ms(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e5).round() / 1e2
}

impl Story {
    fn begin(repetitions: usize) -> Result<Self> {
        let node = Node::start("demo", With::ColdSnap)?;
        let log = node.logs().join("llama-server.log");
        let date = time::OffsetDateTime::now_utc().format(&time::format_description::well_known::Rfc3339)?;
        let mut report = Report { date, machine: Machine::this()?, repetitions, ..Report::default() };
        report.prompt = llama::PROMPT.to_owned();
        let coldsnap = program("coldsnap");
        let coldsnap = coldsnap.to_str().context("the repository's path is not UTF-8")?;
        for (name, command) in [
            ("containerd", ["containerd", "--version"]),
            ("runc", ["runc", "--version"]),
            ("criu", ["criu", "--version"]),
            ("llama-server", ["llama-server", "--version"]),
            ("coldsnap", [coldsnap, "--version"]),
        ] {
            let out = process::output(Command::new(command[0]).arg(command[1]))?;
            let said =
                [out.stdout, out.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
            let version = said.lines().next().unwrap_or_default().trim().to_owned();
            println!("   {name}: {version}");
            report.versions.insert(name.to_owned(), version);
        }
        let Machine { cpu, cores, memory_kb, kernel, load_average } = &report.machine;
        println!(
            "   {cpu}, {cores} cores, {}, Linux {kernel}, load {load_average}",
            megabytes(memory_kb * 1024)
        );
        report.versions.insert("kernel".to_owned(), report.machine.kernel.clone());
        Ok(Self { node, report, log, stored_before: 0 })
    }

    fn cold_start(&mut self) -> Result<()> {
        let archive = Path::new("/var/lib/coldsnap/llama.tar");
        llama::write_image(archive)?;
        self.node.ctr().import(archive, COLDSNAP.snapshotter)?;
        self.node.ctr().import(archive, STOCK.snapshotter)?;
        std::fs::remove_file(archive)?;
        println!("   {}", self.shown(COLDSNAP, llama::IMAGE, "server")?);
        let words = self.start(COLDSNAP, llama::IMAGE, "server")?;
        self.report.answer = words.spoken.text;
        println!("   {:?}: {:?} after {:.0} ms", llama::PROMPT, self.report.answer, ms(words.first_token));
        Ok(())
    }

    fn capture(&mut self) -> Result<()> {
        self.stored_before = self.node.stored_bytes()?;
        let capture = self.capture_as("server", CAPSULE)?;
        self.report.capture_seconds = capture.capture_seconds;
        self.report.freeze_seconds = capture.freeze_seconds;
        self.report.pages_image_bytes = capture.pages_image_bytes;
        self.report.residual_bytes = capture.residual_bytes;
        self.report.payload_bytes = capture.payload_bytes;
        let ratio = capture.model_bytes_matched_ratio;
        self.report.model_bytes_matched_ratio =
            ratio.context("the capture does not say how much of the model it found")?;
        self.node.ctr().remove("server")
    }

    fn restore(&mut self) -> Result<()> {
        println!("   {}", self.shown(COLDSNAP, CAPSULE, "r1")?);
        let took = ms(self.start(COLDSNAP, CAPSULE, "r1")?.first_token);
        println!("   the same answer after {took:.0} ms (containerd unpacked the capsule layer in it)");
        self.report.first_restore_first_token_ms = took;
        self.report.stored_bytes = self.node.stored_bytes()?.saturating_sub(self.stored_before);
        Ok(())
    }

    fn replicas(&mut self) -> Result<()> {
        let mut times = vec![self.report.first_restore_first_token_ms];
        for id in ["r2", "r3", "r4"] {
            times.push(ms(self.start(COLDSNAP, CAPSULE, id)?.first_token));
        }
        for (id, first_token_ms) in ["r1", "r2", "r3", "r4"].into_iter().zip(times) {
            let used = memory::of(&self.node.ctr().pids(id)?)?;
            let replica = Replica {
                private_kb: used.private_kb,
                shared_kb: used.shared_kb,
                anonymous_kb: used.anonymous_kb,
                first_token_ms,
            };
            self.report.replicas.push(replica);
        }
        self.report.print_replicas();
        self.node.ctr().remove_all()
    }

    fn peer(&mut self) -> Result<()> {
        self.start(STOCK, llama::IMAGE, "peer")?;
        let ctr = self.node.ctr();
        let before = self.node.stored_bytes()?;
        let begin = Instant::now();
        ctr.run(["containers", "checkpoint", "--rw", "--task", "--image", "peer", PEER_CHECKPOINT])?;
        let checkpoint_seconds = begin.elapsed().as_secs_f64();
        ctr.remove("peer")?;
        println!("   the same answer after {:.0} ms", ms(self.restore_peer("p1")?.first_token));
        let stored_bytes = self.node.stored_bytes()?.saturating_sub(before);
        // A second restored one is refused, as both would have the captured one's cgroup. A plain server shares the same files.
        self.start(STOCK, llama::IMAGE, "beside")?;
        let ctr = self.node.ctr();
        let used = memory::of(&ctr.pids("p1")?)?;
        self.report.peer =
            Peer { checkpoint_seconds, stored_bytes, private_kb: used.private_kb, ..Peer::default() };
        println!(
            "   stored {}, private memory {}",
            megabytes(stored_bytes),
            megabytes(used.private_kb * 1024)
        );
        ctr.remove_all()
    }

    fn measure(&mut self) -> Result<()> {
        for round in 1..=self.report.repetitions {
            for cold in [false, true] {
                let start = self
                    .measured(cold, !cold, "server", |story| story.start(COLDSNAP, llama::IMAGE, "server"))?;
                let restore =
                    self.measured(cold, !cold, "r1", |story| story.start(COLDSNAP, CAPSULE, "r1"))?;
                let peer = self.measured(cold, false, "p1", |story| story.restore_peer("p1"))?;
                println!(
                    "   round {round}, page cache {}: start {:.0} ms, restore {:.0} ms (running after {:.0} ms), peer {:.0} ms",
                    if cold { "dropped" } else { "warm" },
                    start.first_token_ms,
                    restore.first_token_ms,
                    restore.started_ms,
                    peer.first_token_ms
                );
                let report = &mut self.report;
                if cold {
                    report.cold_start_first_token_ms.cold_cache.push(start.first_token_ms);
                    report.restore_cold_first_token_ms.push(restore.first_token_ms);
                    report.restore_cold_started_ms.push(restore.started_ms);
                    report.peer.restore_cold_first_token_ms.push(peer.first_token_ms);
                } else {
                    report.cold_start_first_token_ms.warm_cache.push(start.first_token_ms);
                    report.restore_warm_first_token_ms.push(restore.first_token_ms);
                    report.restore_warm_started_ms.push(restore.started_ms);
                    report.peer.restore_warm_first_token_ms.push(peer.first_token_ms);
                    report.tokens_per_second.cold_started.extend(start.tokens_per_second);
                    report.tokens_per_second.restored.extend(restore.tokens_per_second);
                }
            }
        }
        let TokensPerSecond { cold_started, restored } = &self.report.tokens_per_second;
        println!(
            "   {LONG_ANSWER} tokens: {:.1} per second cold-started, {:.1} restored",
            median(cold_started),
            median(restored)
        );
        Ok(())
    }

    /// One run of `start` and, if asked for, a long answer of the server. Nothing else runs meanwhile. Before a run with a
    /// warm cache the same is done once without being measured, because the run before it dropped the caches.
    fn measured(
        &self,
        cold_cache: bool,
        long_answer: bool,
        id: &str,
        start: impl Fn(&Self) -> Result<FirstWords>,
    ) -> Result<Run> {
        if cold_cache {
            drop_caches()?;
        } else {
            start(self)?;
            self.node.ctr().remove(id)?;
        }
        let words = start(self)?;
        let ctr = self.node.ctr();
        let tokens_per_second = if long_answer {
            Some(llama::ask(ctr.init_pid(id)?, LONG_ANSWER)?.tokens_per_second())
        } else {
            None
        };
        ctr.remove(id)?;
        Ok(Run { first_token_ms: ms(words.first_token), started_ms: ms(words.started), tokens_per_second })
    }

    fn capture_again(&mut self) -> Result<()> {
        let before = bytes_below(Path::new(PAYLOADS))?;
        for (image, id, capsule) in [
            (llama::IMAGE, "server", "demo.local/llm-capsule:2"),
            (CAPSULE, "r1", "demo.local/llm-capsule:3"),
        ] {
            self.start(COLDSNAP, image, id)?;
            let capture = self.capture_as(id, capsule)?;
            self.node.ctr().remove(id)?;
            if !capture.payload_reused {
                println!("   the payload of {capsule} was written again");
            }
            self.start(COLDSNAP, capsule, "again")?;
            self.node.ctr().remove("again")?;
        }
        self.report.second_capture_new_payload_bytes =
            bytes_below(Path::new(PAYLOADS))?.saturating_sub(before);
        println!(
            "   both restore with the same answer; payload bytes added: {}",
            self.report.second_capture_new_payload_bytes
        );
        Ok(())
    }

    /// `ctr run -d` and the first question.
    fn start(&self, plugins: Plugins, image: &str, id: &str) -> Result<FirstWords> {
        let launch = llama::launch(plugins, image, id, &self.log)?;
        self.same_answer(id, || self.node.ctr().start(&launch))
    }

    /// `ctr containers restore --live` and the first question.
    fn restore_peer(&self, id: &str) -> Result<FirstWords> {
        let ctr = self.node.ctr();
        self.same_answer(id, || {
            ctr.run(["containers", "restore", "--live", id, PEER_CHECKPOINT])?;
            netns::raise_loopback(ctr.init_pid(id)?)
        })
    }

    /// Starts a server and asks it. An answer that differs from the first server's ends the demo.
    fn same_answer(&self, id: &str, start: impl FnOnce() -> Result<()>) -> Result<FirstWords> {
        let words = llama::first_words(self.node.ctr(), id, start)?;
        let (answer, expected) = (&words.spoken.text, &self.report.answer);
        if !expected.is_empty() && answer != expected {
            bail!("container {id} answered {answer:?}, the cold-started server had answered {expected:?}");
        }
        Ok(words)
    }

    fn shown(&self, plugins: Plugins, image: &str, id: &str) -> Result<String> {
        let launch = llama::launch(plugins, image, id, &self.log)?;
        Ok(format!("ctr {}", launch.arguments(true).join(" ")))
    }

    fn capture_as(&self, id: &str, capsule: &str) -> Result<Capture> {
        let model = node::model().canonicalize()?;
        let mut command = Command::new(program("coldsnap"));
        command.args(["--json", "capture", id, "--image", capsule, "--model"]).arg(model);
        println!("   {}", process::shown(&command).replace(&format!("{}/", program("").display()), ""));
        let json = process::run(&mut command)?;
        let capture: Capture =
            serde_json::from_str(&json).with_context(|| format!("cannot understand {json:?}"))?;
        let found = capture
            .model_bytes_matched_ratio
            .map(|ratio| format!("{:.2} % of the tensors found", ratio * 100.0));
        println!(
            "   {:.2} s, of which the server stood still {:.2} s; payload {} ({}{}), residual {}, pages {}",
            capture.capture_seconds,
            capture.freeze_seconds,
            megabytes(capture.payload_bytes),
            found.as_deref().unwrap_or("mapped since the restore"),
            if capture.payload_reused { ", known already" } else { "" },
            megabytes(capture.residual_bytes),
            megabytes(capture.pages_image_bytes),
        );
        Ok(capture)
    }
}
