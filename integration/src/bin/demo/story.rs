//! The story, step by step. Every step fails loudly, with its number and name.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use coldsnap_integration::ctr::{COLDSNAP, Plugins, STOCK};
use coldsnap_integration::llama::{self, Spoken};
use coldsnap_integration::memory::{self, drop_caches};
use coldsnap_integration::node::{self, Node, With, bytes_below, program};
use coldsnap_integration::{netns, process};

use crate::report::{Capture, Machine, Peer, Replica, Report, median, megabytes};

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
    let report = story.report;
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
        let mut report =
            Report { date, machine: Machine::this()?, repetitions, answers_equal: true, ..Report::default() };
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
        let (spoken, took) = self.start(COLDSNAP, llama::IMAGE, "server")?;
        println!(
            "   {}\n   {:?} answered {:?} after {:.0} ms",
            self.shown(COLDSNAP, llama::IMAGE, "server")?,
            llama::PROMPT,
            spoken.text,
            ms(took)
        );
        self.report.answer = spoken.text;
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
        let (spoken, took) = self.start(COLDSNAP, CAPSULE, "r1")?;
        self.compare("r1", &spoken)?;
        println!("   the same answer after {:.0} ms (containerd unpacked the capsule layer in it)", ms(took));
        self.report.first_restore_first_token_ms = ms(took);
        self.report.stored_bytes = self.node.stored_bytes()?.saturating_sub(self.stored_before);
        Ok(())
    }

    fn replicas(&mut self) -> Result<()> {
        let mut times = vec![self.report.first_restore_first_token_ms];
        for id in ["r2", "r3", "r4"] {
            let (spoken, took) = self.start(COLDSNAP, CAPSULE, id)?;
            self.compare(id, &spoken)?;
            times.push(ms(took));
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
        let (spoken, _) = self.start(STOCK, llama::IMAGE, "peer")?;
        self.compare("peer", &spoken)?;
        let ctr = self.node.ctr();
        let before = self.node.stored_bytes()?;
        let begin = Instant::now();
        ctr.run(["containers", "checkpoint", "--rw", "--task", "--image", "peer", PEER_CHECKPOINT])?;
        let checkpoint_seconds = begin.elapsed().as_secs_f64();
        ctr.remove("peer")?;
        let (spoken, took) = self.restore_peer("p1")?;
        self.compare("p1", &spoken)?;
        println!("   the same answer after {:.0} ms", ms(took));
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
                let started = self
                    .measured(cold, !cold, "server", |story| story.start(COLDSNAP, llama::IMAGE, "server"))?;
                let restored =
                    self.measured(cold, !cold, "r1", |story| story.start(COLDSNAP, CAPSULE, "r1"))?;
                let peer = self.measured(cold, false, "p1", |story| story.restore_peer("p1"))?;
                println!(
                    "   round {round}, page cache {}: start {:.0} ms, restore {:.0} ms, peer {:.0} ms",
                    if cold { "dropped" } else { "warm" },
                    started.0,
                    restored.0,
                    peer.0
                );
                let report = &mut self.report;
                report.tokens_per_second.cold_started.extend(started.1);
                report.tokens_per_second.restored.extend(restored.1);
                let (starts, restores, peers) = if cold {
                    (
                        &mut report.cold_start_first_token_ms.cold_cache,
                        &mut report.restore_cold_first_token_ms,
                        &mut report.peer.restore_cold_first_token_ms,
                    )
                } else {
                    (
                        &mut report.cold_start_first_token_ms.warm_cache,
                        &mut report.restore_warm_first_token_ms,
                        &mut report.peer.restore_warm_first_token_ms,
                    )
                };
                starts.push(started.0);
                restores.push(restored.0);
                peers.push(peer.0);
            }
        }
        let speed = &self.report.tokens_per_second;
        println!(
            "   {LONG_ANSWER} tokens: {:.1} per second cold-started, {:.1} restored",
            median(&speed.cold_started),
            median(&speed.restored)
        );
        Ok(())
    }

    /// One run of `start`: milliseconds to the first token and, if asked for, tokens per second of a long answer. Nothing else runs meanwhile.
    fn measured(
        &mut self,
        cold_cache: bool,
        long_answer: bool,
        id: &str,
        start: impl FnOnce(&Self) -> Result<(Spoken, Duration)>,
    ) -> Result<(f64, Option<f64>)> {
        if cold_cache {
            drop_caches()?;
        }
        let (spoken, took) = start(self)?;
        self.compare(id, &spoken)?;
        let ctr = self.node.ctr();
        let speed = if long_answer {
            Some(llama::ask(ctr.init_pid(id)?, LONG_ANSWER)?.tokens_per_second())
        } else {
            None
        };
        ctr.remove(id)?;
        Ok((ms(took), speed))
    }

    fn capture_again(&mut self) -> Result<()> {
        let before = bytes_below(Path::new(PAYLOADS))?;
        for (image, id, capsule) in [
            (llama::IMAGE, "server", "demo.local/llm-capsule:2"),
            (CAPSULE, "r1", "demo.local/llm-capsule:3"),
        ] {
            let (spoken, _) = self.start(COLDSNAP, image, id)?;
            self.compare(id, &spoken)?;
            let capture = self.capture_as(id, capsule)?;
            self.node.ctr().remove(id)?;
            if !capture.payload_reused {
                println!("   the payload of {capsule} was written again");
            }
            let (spoken, _) = self.start(COLDSNAP, capsule, "again")?;
            self.compare("again", &spoken)?;
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
    fn start(&self, plugins: Plugins, image: &str, id: &str) -> Result<(Spoken, Duration)> {
        let launch = llama::launch(plugins, image, id, &self.log)?;
        let ctr = self.node.ctr();
        llama::time_to_first_token(ctr, id, || ctr.start(&launch))
    }

    /// `ctr containers restore --live` and the first question.
    fn restore_peer(&self, id: &str) -> Result<(Spoken, Duration)> {
        let ctr = self.node.ctr();
        llama::time_to_first_token(ctr, id, || {
            ctr.run(["containers", "restore", "--live", id, PEER_CHECKPOINT])?;
            netns::raise_loopback(ctr.init_pid(id)?)
        })
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

    /// A different answer is a failure of the restore, and the end of the demo.
    fn compare(&mut self, id: &str, spoken: &Spoken) -> Result<()> {
        if spoken.text != self.report.answer {
            self.report.answers_equal = false;
            bail!(
                "container {id} answered {:?}, the cold-started server had answered {:?}",
                spoken.text,
                self.report.answer
            );
        }
        Ok(())
    }
}
