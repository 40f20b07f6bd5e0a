//! A source that rebuilds a payload from the pinned checkpoint.
//!
//! One thread reads and checks each extent against the manifest while the caller hashes and writes: a ring of a few
//! buffers is all the memory that it takes, whatever the size of the model.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};

use super::capsule::CapsuleDocuments;
use super::files::{CheckpointFile, CheckpointFiles};
use super::plan::{NeededFile, RebuildExtent, RebuildPiece, RebuildPlan};
use super::{OtherBytes, RecoverError};
use crate::format::pack::{ExtentSummer, padding};
use crate::source::{FetchError, Sink, Source, Wanted};

/// One read, and what is handed over at once.
const BUFFER: usize = 1 << 20;
/// Buffers on their way.
const RING: usize = 8;
/// Pieces that an error names.
const SHOWN: usize = 3;

/// The checkpoint as a source of one worker's payload. Nothing is opened before bytes are wanted.
#[derive(Debug, Clone)]
pub struct FromCheckpoint {
    capsule: Arc<CapsuleDocuments>,
    worker: String,
    files: Arc<dyn CheckpointFiles>,
}

impl FromCheckpoint {
    /// Rebuilds the payload of `worker` of this capsule.
    pub fn new(capsule: Arc<CapsuleDocuments>, worker: &str, files: Arc<dyn CheckpointFiles>) -> Self {
        Self { capsule, worker: worker.to_owned(), files }
    }

    fn rebuild(&self, wanted: &Wanted, from: u64, sink: &mut Sink<'_>) -> Result<(), FetchError> {
        let plan = self.capsule.plan(&self.worker)?;
        if (plan.digest, plan.bytes) != (wanted.digest, wanted.bytes) {
            return Err(RecoverError::OtherPayload { rebuilds: plan.digest, wanted: wanted.digest }.into());
        }
        let files = open_all(&plan, self.files.as_ref())?;
        deliver(&plan, &files, from, sink).map_err(|error| match error {
            FetchError::Checkpoint(error) => FetchError::Checkpoint(Box::new(self.explained(*error, &plan))),
            other => other,
        })
    }

    /// The headers tell whether another checkpoint was named or the right one was damaged.
    fn explained(&self, error: RecoverError, plan: &RebuildPlan) -> RecoverError {
        let RecoverError::OtherBytes(mut other) = error else { return error };
        let names: Vec<&str> = plan.files.iter().map(|file| file.name.as_str()).collect();
        other.hint = match (plan.metadata_sha256, self.files.metadata_sha256(&names)) {
            (Some(pinned), Some(here)) if pinned == here => {
                "; names, sizes and tensors are those of the captured checkpoint: its bytes were changed"
            }
            (Some(_), Some(_)) => {
                "; its tensors are not those of the captured checkpoint, or that had more files"
            }
            _ => "",
        };
        RecoverError::OtherBytes(other)
    }
}

impl Source for FromCheckpoint {
    fn name(&self) -> String {
        format!("checkpoint {}", self.files.place())
    }

    fn fetch(&self, wanted: &Wanted, from: u64, sink: &mut Sink<'_>) -> Result<(), FetchError> {
        self.rebuild(wanted, from, sink)
    }
}

/// Opens every file, so that what is missing or too short is known before anything is written.
fn open_all(
    plan: &RebuildPlan,
    files: &dyn CheckpointFiles,
) -> Result<Vec<Box<dyn CheckpointFile>>, RecoverError> {
    let open = |needed: &NeededFile| {
        let file = files.open(&needed.name)?;
        let found = file.bytes().map_err(|source| RecoverError::Io {
            action: "ask",
            file: needed.name.clone(),
            source,
        })?;
        if found < needed.bytes {
            let (file, place) = (needed.name.clone(), file.place());
            return Err(RecoverError::ShortFile { file, place, needed: needed.bytes, found });
        }
        Ok(file)
    };
    plan.files.iter().map(open).collect()
}

fn deliver(
    plan: &RebuildPlan,
    files: &[Box<dyn CheckpointFile>],
    from: u64,
    sink: &mut Sink<'_>,
) -> Result<(), FetchError> {
    std::thread::scope(|scope| {
        let (filled, arriving) = sync_channel::<Vec<u8>>(RING);
        let (emptied, returning) = channel::<Vec<u8>>();
        let reader = scope.spawn(move || {
            let feed = Feed { filled, returning, buffer: Vec::new(), used: 0, made: 0, skip: 0 };
            read(plan, files, from, feed)
        });
        let delivered = hand_over(&arriving, &emptied, sink);
        // A reader that waits for room sees that nobody takes anything any more.
        drop((arriving, emptied));
        let read = reader.join().unwrap_or_else(|_| {
            let source = std::io::Error::other("the reading thread panicked");
            Err(Stop::Failed(RecoverError::Io { action: "read", file: String::new(), source }))
        });
        delivered?;
        match read {
            Err(Stop::Failed(error)) => Err(error.into()),
            Ok(()) | Err(Stop::NotWanted) => Ok(()),
        }
    })
}

fn hand_over(
    arriving: &Receiver<Vec<u8>>,
    emptied: &Sender<Vec<u8>>,
    sink: &mut Sink<'_>,
) -> Result<(), FetchError> {
    for buffer in arriving {
        sink(&buffer)?;
        // The reader may have finished.
        let _ = emptied.send(buffer);
    }
    Ok(())
}

/// Why the reader ends early.
enum Stop {
    Failed(RecoverError),
    NotWanted,
}

impl From<RecoverError> for Stop {
    fn from(error: RecoverError) -> Self {
        Self::Failed(error)
    }
}

/// The reader's end of the ring.
struct Feed {
    filled: SyncSender<Vec<u8>>,
    returning: Receiver<Vec<u8>>,
    buffer: Vec<u8>,
    used: usize,
    made: usize,
    /// Bytes that are read for the digest of their extent but that the caller has already.
    skip: u64,
}

impl Feed {
    /// Room for the next bytes, at most `most` of them.
    fn room(&mut self, most: u64) -> Result<&mut [u8], Stop> {
        if self.used == BUFFER {
            self.flush()?;
        }
        if self.buffer.is_empty() {
            self.buffer = match self.returning.try_recv() {
                Ok(buffer) => buffer,
                Err(_) if self.made <= RING => {
                    self.made += 1;
                    Vec::new()
                }
                Err(_) => self.returning.recv().map_err(|_| Stop::NotWanted)?,
            };
            self.buffer.resize(BUFFER, 0);
        }
        let most = if self.skip > 0 { most.min(self.skip) } else { most };
        let end = self.used + usize::try_from(most).unwrap_or(BUFFER).min(BUFFER - self.used);
        Ok(&mut self.buffer[self.used..end])
    }

    /// So many bytes of the room hold what is next.
    fn took(&mut self, bytes: usize) {
        if self.skip > 0 {
            self.skip -= bytes as u64;
        } else {
            self.used += bytes;
        }
    }

    fn flush(&mut self) -> Result<(), Stop> {
        if self.used == 0 {
            return Ok(());
        }
        let mut buffer = std::mem::take(&mut self.buffer);
        buffer.truncate(std::mem::take(&mut self.used));
        self.filled.send(buffer).map_err(|_| Stop::NotWanted)
    }
}

fn read(
    plan: &RebuildPlan,
    files: &[Box<dyn CheckpointFile>],
    from: u64,
    mut feed: Feed,
) -> Result<(), Stop> {
    let first = plan.extents.partition_point(|extent| extent.end() <= from);
    for extent in &plan.extents[first..] {
        feed.skip = from.saturating_sub(extent.offset);
        read_extent(plan, extent, files, &mut feed)?;
    }
    feed.flush()
}

fn read_extent(
    plan: &RebuildPlan,
    extent: &RebuildExtent,
    files: &[Box<dyn CheckpointFile>],
    feed: &mut Feed,
) -> Result<(), Stop> {
    let mut summer = ExtentSummer::default();
    let mut at = 0;
    for piece in &extent.pieces {
        zeros(piece.extent_offset - at, feed, Some(&mut summer))?;
        let mut done = 0;
        while done < piece.length {
            let room = feed.room(piece.length - done)?;
            let offset = piece.file_offset + done;
            files[piece.file].read_exact_at(room, offset).map_err(|source| RecoverError::Io {
                action: "read",
                file: format!("{} at offset {offset}", plan.files[piece.file].name),
                source,
            })?;
            summer.update(room);
            let bytes = room.len();
            feed.took(bytes);
            done += bytes as u64;
        }
        at = piece.extent_offset + piece.length;
    }
    zeros(extent.sum.size - at, feed, Some(&mut summer))?;
    let found = summer.finish();
    if found != extent.sum {
        let other = OtherBytes {
            extent: extent.semantic_id,
            offset: extent.offset,
            bytes: extent.sum.size,
            pieces: shown(plan, extent),
            expected: extent.sum.sha256,
            found: found.sha256,
            hint: "",
        };
        return Err(Stop::Failed(RecoverError::OtherBytes(Box::new(other))));
    }
    zeros(padding(extent.sum.size), feed, None)
}

fn zeros(count: u64, feed: &mut Feed, mut summer: Option<&mut ExtentSummer>) -> Result<(), Stop> {
    let mut left = count;
    while left > 0 {
        let room = feed.room(left)?;
        room.fill(0);
        if let Some(summer) = &mut summer {
            summer.update(room);
        }
        let bytes = room.len();
        feed.took(bytes);
        left -= bytes as u64;
    }
    Ok(())
}

fn shown(plan: &RebuildPlan, extent: &RebuildExtent) -> String {
    let one = |piece: &RebuildPiece| {
        format!("{} at offset {} ({} bytes)", plan.files[piece.file].name, piece.file_offset, piece.length)
    };
    let mut list: Vec<String> = extent.pieces.iter().take(SHOWN).map(one).collect();
    if extent.pieces.len() > SHOWN {
        list.push(format!("{} more pieces", extent.pieces.len() - SHOWN));
    }
    if list.is_empty() { "no piece, all zero".to_owned() } else { list.join(", ") }
}
