//! The kinds of memory. Each is a way in which a rewrite of process images can go wrong.

use std::io::{PipeReader, PipeWriter, Read, Write, pipe};
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::mpsc::{Receiver, Sender, channel};

use anyhow::{Context, Result, anyhow, bail};
use clap::ValueEnum;

use coldsnap_integration::guest::MADE;
use coldsnap_integration::pattern::{self, PAGE};

use crate::region::Region;

/// Seeds of what is written over the memory later.
const WRITTEN: u64 = 2;
const WRITTEN_BY_CHILD: u64 = 3;

#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum Kind {
    /// One process, one mapping.
    Block,
    /// Four threads, each with a mapping and thread-local data of its own, each checking its own.
    Threads,
    /// A parent and a child that share pages by copy on write, each of which wrote some of its own.
    Fork,
    /// Adjacent VMAs of different protection: one run of present pages spans them.
    Neighbour,
    /// The brk heap and large `malloc` blocks, with holes.
    Heap,
    /// A `malloc` block that is freed (`free`) and asked for again by `calloc` (`calloc`), which must give zeros. Meant for an allocator
    /// that purges with MADV_DONTNEED and trusts the zeros: jemalloc, by LD_PRELOAD, with both its decay times 0.
    CallocAfterFree,
    /// A process without model memory and two children, each of which loads the whole model: data-parallel workers.
    DataParallel,
    /// The same with half of the model in each: tensor-parallel workers.
    TensorParallel,
    /// A block, and an io_uring, which no CRIU can dump.
    IoUring,
}

/// Memory of known content.
pub trait Guest {
    /// Checks all of it; returns the bytes checked.
    fn check(&mut self) -> Result<u64>;

    /// Writes a part of it anew.
    fn write(&mut self) -> Result<()> {
        bail!("this kind does not write")
    }

    /// A command of this kind only.
    fn special(&mut self, command: &str) -> Result<String> {
        bail!("unknown command {command:?}")
    }
}

/// Makes `bytes` of memory of a kind.
pub fn make(kind: Kind, bytes: usize) -> Result<Box<dyn Guest>> {
    Ok(match kind {
        Kind::Block => Box::new(Block::new(bytes)?),
        Kind::Threads => Box::new(Threads::new(bytes)?),
        Kind::Fork => Box::new(Fork::new(bytes)?),
        Kind::Neighbour => Box::new(Neighbour::new(bytes)?),
        Kind::Heap => Box::new(Heap::new(bytes)),
        Kind::CallocAfterFree => Box::new(Calloc::new(bytes)?),
        Kind::DataParallel => Box::new(Workers::new([bytes, bytes], [0, 0])?),
        Kind::TensorParallel => Box::new(Workers::new([bytes / 2; 2], [0, bytes / 2 / PAGE])?),
        Kind::IoUring => Box::new(Undumpable::new(bytes)?),
    })
}

struct Block {
    region: Region,
    written: bool,
}

impl Block {
    fn new(bytes: usize) -> Result<Self> {
        let mut region = Region::map(bytes)?;
        region.fill(|_| MADE);
        Ok(Self { region, written: false })
    }

    /// The seed of a page: every fourth is written by `write`.
    fn seed(written: bool) -> impl Fn(usize) -> u64 {
        move |page| if written && page % 4 == 0 { WRITTEN } else { MADE }
    }
}

impl Guest for Block {
    fn check(&mut self) -> Result<u64> {
        self.region.check(Self::seed(self.written))
    }

    fn write(&mut self) -> Result<()> {
        for page in (0..self.region.pages()).step_by(4) {
            pattern::fill(self.region.page(page), WRITTEN, page);
        }
        self.written = true;
        Ok(())
    }
}

/// A block whose process cannot be dumped.
struct Undumpable {
    block: Block,
    _ring: OwnedFd,
}

impl Undumpable {
    fn new(bytes: usize) -> Result<Self> {
        // struct io_uring_params is 120 bytes; the kernel fills it.
        let mut parameters = [0_u64; 15];
        // SAFETY: the kernel writes no further than the structure.
        let ring = unsafe { libc::syscall(libc::SYS_io_uring_setup, 4, parameters.as_mut_ptr()) };
        let ring = i32::try_from(ring).ok().filter(|ring| *ring >= 0);
        let ring = ring.ok_or_else(std::io::Error::last_os_error).context("cannot make an io_uring")?;
        // SAFETY: the kernel has just given us this descriptor.
        Ok(Self { block: Block::new(bytes)?, _ring: unsafe { OwnedFd::from_raw_fd(ring) } })
    }
}

impl Guest for Undumpable {
    fn check(&mut self) -> Result<u64> {
        self.block.check()
    }
}

/// Requests to one thread and its answers.
type Desk = (Sender<()>, Receiver<Result<u64>>);

struct Threads(Vec<Desk>);

impl Threads {
    fn new(bytes: usize) -> Result<Self> {
        let threads = 4;
        let desk = |number: u64| -> Result<Desk> {
            let (ask, asked) = channel();
            let (answer, answered) = channel();
            let mut region = Region::map(bytes / threads)?;
            std::thread::Builder::new().spawn(move || {
                thread_local! { static OWN: std::cell::Cell<u64> = const { std::cell::Cell::new(0) }; }
                OWN.set(pattern::word(number, 0));
                region.fill(|_| number);
                while asked.recv().is_ok() {
                    let own = OWN.get() == pattern::word(number, 0);
                    let checked = if own {
                        region.check(|_| number)
                    } else {
                        Err(anyhow!("thread {number} lost its thread-local data"))
                    };
                    if answer.send(checked).is_err() {
                        return;
                    }
                }
            })?;
            Ok((ask, answered))
        };
        let mut guest = Self((0..threads as u64).map(|number| desk(100 + number)).collect::<Result<_>>()?);
        guest.check()?;
        Ok(guest)
    }
}

impl Guest for Threads {
    fn check(&mut self) -> Result<u64> {
        for (ask, _) in &self.0 {
            ask.send(()).context("a thread is gone")?;
        }
        self.0.iter().map(|(_, answered)| answered.recv().context("a thread is gone")?).sum()
    }
}

/// A forked process that answers questions of one byte, and ends with its parent.
struct Child {
    ask: PipeWriter,
    answer: PipeReader,
}

impl Child {
    /// Forks; the child runs `make` and then answers every byte with what the answer of `make` says to it.
    fn fork<A: FnMut(u8) -> Result<u64>>(make: impl FnOnce() -> Result<A>) -> Result<Self> {
        let (from_parent, to_child) = pipe().context("cannot make a pipe")?;
        let (from_child, to_parent) = pipe().context("cannot make a pipe")?;
        // SAFETY: the process has one thread, so the child may do anything.
        match unsafe { libc::fork() } {
            -1 => Err(std::io::Error::last_os_error()).context("cannot fork"),
            0 => {
                drop((to_child, from_child));
                let answers = make().unwrap_or_else(|_| std::process::exit(1));
                Self::serve(from_parent, to_parent, answers)
            }
            _ => Ok(Self { ask: to_child, answer: from_child }),
        }
    }

    fn serve(mut asked: PipeReader, mut answer: PipeWriter, mut answers: impl FnMut(u8) -> Result<u64>) -> ! {
        let mut byte = [0];
        while matches!(asked.read(&mut byte), Ok(1)) {
            let line = answers(byte[0])
                .map_or_else(|error| format!("in the child, {error:#}"), |bytes| bytes.to_string());
            let framed = format!("{line:<255}\n");
            if answer.write_all(framed.as_bytes()).is_err() {
                break;
            }
        }
        std::process::exit(0)
    }

    fn ask(&mut self, question: u8) -> Result<u64> {
        self.ask.write_all(&[question]).context("the child is gone")?;
        let mut line = [0; 256];
        self.answer.read_exact(&mut line).context("the child is gone")?;
        let line = String::from_utf8_lossy(&line).trim_end().to_owned();
        line.parse().map_err(|_| anyhow!(line))
    }
}

/// Questions to a [`Child`].
const CHECK: u8 = b'?';
const WRITE: u8 = b'w';

struct Fork {
    region: Region,
    child: Child,
}

impl Fork {
    fn new(bytes: usize) -> Result<Self> {
        let mut region = Region::map(bytes)?;
        region.fill(|_| MADE);
        let shared = &mut region;
        let child = Child::fork(move || {
            for page in (0..shared.pages()).step_by(4) {
                pattern::fill(shared.page(page), WRITTEN_BY_CHILD, page);
            }
            Ok(move |_| shared.check(|page| if page % 4 == 0 { WRITTEN_BY_CHILD } else { MADE }))
        })?;
        for page in (0..region.pages()).step_by(5) {
            pattern::fill(region.page(page), WRITTEN, page);
        }
        let mut guest = Self { region, child };
        guest.check()?;
        Ok(guest)
    }
}

impl Guest for Fork {
    fn check(&mut self) -> Result<u64> {
        let child = self.child.ask(CHECK)?;
        Ok(child + self.region.check(|page| if page % 5 == 0 { WRITTEN } else { MADE })?)
    }
}

/// Processes that hold the model, or a part of it, each in memory that it made itself; a small region beside it is
/// different in each.
struct Workers([Child; 2]);

impl Workers {
    /// Each child holds so many bytes of the model, from a page of it on.
    fn new(bytes: [usize; 2], first_page: [usize; 2]) -> Result<Self> {
        let child = |rank: usize| Child::fork(move || Self::worker(rank, bytes[rank], first_page[rank]));
        let mut guest = Self([child(0)?, child(1)?]);
        guest.check()?;
        Ok(guest)
    }

    fn worker(rank: usize, bytes: usize, first: usize) -> Result<impl FnMut(u8) -> Result<u64>> {
        let mut model = Region::map(bytes)?;
        for page in 0..model.pages() {
            pattern::fill(model.page(page), MADE, first + page);
        }
        let own_seed = 100 + rank as u64;
        let mut own = Region::map(64 * PAGE)?;
        own.fill(|_| own_seed);
        let mut written = false;
        Ok(move |question| {
            if question == WRITE {
                for page in (0..model.pages()).step_by(4) {
                    pattern::fill(model.page(page), WRITTEN, first + page);
                }
                written = true;
            }
            for page in 0..model.pages() {
                let seed = if written && page % 4 == 0 { WRITTEN } else { MADE };
                pattern::check(model.page(page), seed, first + page)
                    .with_context(|| format!("rank {rank}"))?;
            }
            Ok((model.pages() * PAGE) as u64 + own.check(|_| own_seed)?)
        })
    }
}

impl Guest for Workers {
    fn check(&mut self) -> Result<u64> {
        self.0.iter_mut().map(|child| child.ask(CHECK)).sum()
    }

    /// Only the first one writes.
    fn write(&mut self) -> Result<()> {
        self.0[0].ask(WRITE).map(drop)
    }
}

struct Neighbour {
    region: Region,
}

impl Neighbour {
    fn new(bytes: usize) -> Result<Self> {
        let mut region = Region::map(bytes)?;
        region.fill(|_| MADE);
        let third = region.pages() / 3;
        region.protect(third, third)?;
        // Small ones too: shorter than any minimum run length.
        region.protect(3, 1)?;
        region.protect(2 * third + 5, 2)?;
        Ok(Self { region })
    }
}

impl Guest for Neighbour {
    fn check(&mut self) -> Result<u64> {
        self.region.check(|_| MADE)
    }
}

struct Heap {
    blocks: Vec<Vec<u64>>,
    seed: u64,
}

impl Heap {
    fn new(bytes: usize) -> Self {
        let mut blocks = Vec::new();
        let mut made = 0;
        while made < bytes {
            // From 3 words to half a megabyte: glibc takes most from brk, those from 128 KiB on from mmap.
            let words = match blocks.len() % 64 {
                0 => 65_536,
                nth => 3 + (nth * nth * nth) % 2_000,
            };
            let mut block = vec![0; words];
            pattern::fill(&mut block, MADE, blocks.len());
            made += words * 8;
            blocks.push(block);
        }
        let mut heap = Self { blocks, seed: MADE };
        heap.make_holes();
        heap
    }

    /// Frees every third block and asks for it again in another size, so that free memory with old content lies between used blocks.
    fn make_holes(&mut self) {
        for block in self.blocks.iter_mut().step_by(3) {
            *block = Vec::new();
        }
        for index in (0..self.blocks.len()).step_by(6) {
            let mut block = vec![0; 40 + index % 500];
            pattern::fill(&mut block, self.seed, index);
            self.blocks[index] = block;
        }
    }
}

impl Guest for Heap {
    fn check(&mut self) -> Result<u64> {
        let mut bytes = 0;
        for (index, block) in self.blocks.iter().enumerate() {
            pattern::check(block, self.seed, index)?;
            bytes += (block.len() * 8) as u64;
        }
        Ok(bytes)
    }

    fn write(&mut self) -> Result<()> {
        self.seed = WRITTEN;
        for (index, block) in self.blocks.iter_mut().enumerate() {
            pattern::fill(block, WRITTEN, index);
        }
        self.make_holes();
        Ok(())
    }

    fn special(&mut self, command: &str) -> Result<String> {
        if command != "calloc" {
            bail!("unknown command {command:?}");
        }
        // What was freed comes back zeroed: `vec![0; n]` is calloc.
        for words in [3, 50, 400, 1_900, 65_536] {
            let block = vec![0_u64; words];
            if let Some(place) = block.iter().find(|word| **word != 0) {
                bail!("{place:p}: calloc of {words} words gave {place:016x}");
            }
        }
        Ok("zeros".to_owned())
    }
}

/// One block of the C allocator. Rust's own `Vec` would do, but this says which calls are made.
struct Calloc {
    block: *mut u64,
    bytes: usize,
}

impl Calloc {
    fn new(bytes: usize) -> Result<Self> {
        // SAFETY: malloc may be called at any time.
        let block: *mut u64 = unsafe { libc::malloc(bytes) }.cast();
        if block.is_null() {
            bail!("malloc of {bytes} bytes failed");
        }
        let mut guest = Self { block, bytes };
        for (page, memory) in guest.memory()?.chunks_mut(PAGE / 8).enumerate() {
            pattern::fill(memory, MADE, page);
        }
        Ok(guest)
    }

    fn memory(&mut self) -> Result<&mut [u64]> {
        if self.block.is_null() {
            bail!("the block is freed");
        }
        // SAFETY: the allocator gave `bytes` at `block`, initialised by calloc or by `new` before any read; malloc aligns to 16.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.block, self.bytes / 8) })
    }
}

impl Guest for Calloc {
    fn check(&mut self) -> Result<u64> {
        for (page, memory) in self.memory()?.chunks(PAGE / 8).enumerate() {
            pattern::check(memory, MADE, page)?;
        }
        Ok(self.bytes as u64)
    }

    fn special(&mut self, command: &str) -> Result<String> {
        match command {
            "free" => {
                // SAFETY: `block` came from malloc or calloc and is not used any more; free takes null.
                unsafe { libc::free(self.block.cast()) };
                self.block = std::ptr::null_mut();
                Ok("freed".to_owned())
            }
            "calloc" => {
                if !self.block.is_null() {
                    bail!("the block is not freed");
                }
                // SAFETY: calloc may be called at any time.
                self.block = unsafe { libc::calloc(self.bytes, 1) }.cast();
                let start = self.block;
                let wrong = self.memory()?.iter().position(|word| *word != 0);
                if let Some(index) = wrong {
                    bail!(
                        "calloc gave a word that is not 0 at {:p}, word {index} of its block",
                        start.wrapping_add(index)
                    );
                }
                Ok(format!("zeros at {start:p}"))
            }
            _ => bail!("unknown command {command:?}"),
        }
    }
}
