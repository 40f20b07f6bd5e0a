//! One process of a capture: what is model-owned, payload, residual, manifests, rewritten images.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::ops::Range;
use std::path::Path;

use super::checkpoint::Checkpoint;
use super::content_match::{self, ContentMatcher, MatchedRun, MemoryRegion};
use super::earlier::{Earlier, KeptPayload};
use super::plan::{Plan, plan};
use super::progress::Progress;
use super::run::{CaptureError, CaptureRequest};
use super::scope::MappingScope;
use crate::capsule;
use crate::criu::process::ProcessImages;
use crate::criu::remap::{Mapping, bytes_of};
use crate::criu::runs::{PAGE_SIZE, ProcessMemory, memory_of, sub_run};
use crate::format::HostWorker;
use crate::format::native_manifest::{
    BlobStat, Entry, ModelExtent, NativeManifest, Placement, ResidualExtent, WEIGHTS,
};
use crate::format::recovery_manifest::{ModelSource, RecoveryManifest, RecoveryPiece, RecoverySource};
use crate::format::residual::ResidualLayout;
use crate::format::semantic_id;
use crate::store::AdmittedPayload;

/// A process whose plan is made; nothing is written yet.
#[derive(Debug)]
pub struct PlannedWorker<'a> {
    /// Worker id.
    pub id: String,
    /// The process.
    pub process: &'a ProcessImages,
    /// Its memory.
    pub memory: ProcessMemory,
    /// What is mapped from where.
    pub plan: Plan,
    /// A payload that it maps since its restore.
    pub kept: Option<KeptPayload<'a>>,
    model: Vec<content_match::ModelExtent>,
    /// Where the checkpoint was found in its memory.
    pub matched: Vec<MatchedRun>,
}

/// A process whose payload and residual are written.
#[derive(Debug)]
pub struct WrittenWorker {
    /// The payload, unless the process owns no model bytes.
    pub payload: Option<AdmittedPayload>,
    /// Whether the store had the payload already.
    pub payload_reused: bool,
    /// Its mappings, in address order.
    pub mappings: Vec<Mapping>,
    /// Size of the residual in bytes.
    pub residual_bytes: u64,
    /// Number of model extents.
    pub model_extents: usize,
    /// Where the model's bytes come from.
    pub model_source: Option<ModelSource>,
}

/// Ids of a worker's file entries in the new images.
#[derive(Debug, Clone, Copy)]
pub struct FileIds {
    /// Of the payload.
    pub pack: u32,
    /// Of the residual.
    pub residual: u32,
}

impl<'a> PlannedWorker<'a> {
    /// Finds what is model-owned and decides what is mapped. `elsewhere` is where the other processes hold the model.
    pub fn plan(
        process: &'a ProcessImages,
        earlier: &'a Earlier,
        matcher: Option<&ContentMatcher<'_>>,
        elsewhere: &[MatchedRun],
        scope: MappingScope,
    ) -> Result<Self, CaptureError> {
        let kept = earlier.kept(process);
        let memory = memory_of(process, &earlier.dissolved(kept.as_ref()))?;
        let id = earlier.worker_of(process).map_or_else(|| format!("w{}", process.pid), str::to_owned);
        let (model, matched) = match matcher {
            Some(matcher) if kept.is_none() => {
                let (model, matched) = find_model(process, &memory, earlier, matcher, elsewhere)?;
                (distinct(model), matched)
            }
            _ => (Vec::new(), Vec::new()),
        };
        let ranges: Vec<Range<u64>> = model.iter().map(|m| m.address..m.address + m.len).collect();
        let plan = plan(&memory, &ranges, scope);
        let model = model.into_iter().filter(|m| plan.model.iter().any(|r| r.start == m.address)).collect();
        Ok(Self { id, process, memory, plan, kept, model, matched })
    }

    /// Whether anything of the process is mapped.
    pub fn is_worker(&self) -> bool {
        self.kept.is_some() || !self.plan.model.is_empty() || !self.plan.residual.is_empty()
    }

    /// Writes payload, residual and manifests into the worker's directory below `layer_root`.
    pub fn write(
        &self,
        request: &CaptureRequest<'_>,
        earlier: &Earlier,
        ids: FileIds,
        rank: u32,
        progress: &mut dyn Progress,
    ) -> Result<WrittenWorker, CaptureError> {
        let dir = request.layer_root.join(capsule::worker_dir(&self.id));
        fs::create_dir_all(&dir).map_err(|e| CaptureError::io("create", &dir, e))?;
        let bytes = earlier.bytes();
        let entries = self.entries();

        let mut mappings = Vec::new();
        let (payload, extents, payload_reused) = match &self.kept {
            Some(kept) => {
                let payload = request.store.admit(&kept.digest, None, &mut |n| progress.advance(n))?;
                let extents = kept.extents.iter().map(|e| with_allocation(e.clone(), &entries)).collect();
                (Some(payload), extents, true)
            }
            None if self.plan.model.is_empty() => (None, Vec::new(), false),
            None => {
                progress.begin("write payload", 2 * total(&self.plan.model));
                let (payload, extents, reused) =
                    self.publish(request, &bytes, &entries, &mut |n| progress.advance(n))?;
                for extent in &extents {
                    let range = extent.ptr..extent.ptr + extent.size;
                    mappings.extend(self.mappings(&range, ids.pack, extent.offset));
                }
                (Some(payload), extents, reused)
            }
        };
        if payload.is_some() {
            let placeholder = dir.join(capsule::PACK_NAME);
            fs::write(&placeholder, b"").map_err(|e| CaptureError::io("write", &placeholder, e))?;
        }

        progress.begin("write residual", total(&self.plan.residual));
        let path = dir.join(capsule::RESIDUAL_NAME);
        let residual = self.write_residual(&path, &bytes, &entries, progress)?;
        for extent in &residual {
            mappings.extend(self.mappings(
                &(extent.ptr..extent.ptr + extent.size),
                ids.residual,
                extent.offset,
            ));
        }
        mappings.sort_unstable_by_key(|m| m.start);

        let stat = |path: &Path| -> Result<BlobStat, CaptureError> {
            let metadata = fs::metadata(path).map_err(|e| CaptureError::io("describe", path, e))?;
            Ok(BlobStat::of(&metadata))
        };
        let residual_blob_stat = stat(&path)?;
        let model_extents = extents.len();
        let (native, _) = NativeManifest::host(HostWorker {
            worker_id: self.id.clone(),
            capture_id: request.capture_id.clone(),
            host: request.host.clone(),
            pid: self.process.pid,
            rank,
            created_unix_ns: request.created_unix_ns,
            page_size: PAGE_SIZE,
            entries,
            model_weight_extents: extents,
            model_blob_stat: payload.as_ref().map_or(Ok(BlobStat::default()), |p| stat(p.path()))?,
            residual_extents: residual,
            residual_layout: ResidualLayout::Contiguous,
            residual_blob_stat,
            blob_reused: payload_reused,
            write_seconds: 0.0,
            verification_seconds: 0.0,
            phase_seconds: BTreeMap::new(),
        })?;
        native.write(&dir.join(capsule::NATIVE_MANIFEST_NAME))?;
        let recovery = self.recovery(request, &native)?;
        recovery.write(&dir.join(capsule::RECOVERY_MANIFEST_NAME))?;
        Ok(WrittenWorker {
            payload,
            payload_reused,
            mappings,
            residual_bytes: residual_blob_stat.bytes,
            model_extents,
            model_source: recovery.model_source,
        })
    }

    fn publish(
        &self,
        request: &CaptureRequest<'_>,
        bytes: &BTreeMap<u32, &[u8]>,
        entries: &[Entry],
        progress: &mut dyn FnMut(u64),
    ) -> Result<(AdmittedPayload, Vec<ModelExtent>, bool), CaptureError> {
        let sources: Vec<Vec<&[u8]>> =
            self.plan.model.iter().map(|range| self.slices(range, bytes)).collect::<Result<_, _>>()?;
        let published = request.store.publish_pack(&sources, progress)?;
        let extents = published
            .layout
            .extents()
            .iter()
            .map(|placed| {
                let found = &self.model[placed.source_index];
                let extent = ModelExtent {
                    ptr: found.address,
                    size: found.len,
                    allocation_ptr: 0,
                    semantic_id: semantic_id::named(&found.members),
                    sha256: placed.sum.sha256,
                    offset: placed.offset,
                    crc32: placed.sum.crc32,
                    placement: Some(Placement::Mapped),
                };
                with_allocation(extent, entries)
            })
            .collect();
        Ok((published.payload, extents, published.reused))
    }

    fn write_residual(
        &self,
        path: &Path,
        bytes: &BTreeMap<u32, &[u8]>,
        entries: &[Entry],
        progress: &mut dyn Progress,
    ) -> Result<Vec<ResidualExtent>, CaptureError> {
        let io = |e: io::Error| CaptureError::io("write", path, e);
        let mut out = BufWriter::with_capacity(1 << 20, File::create(path).map_err(io)?);
        let mut extents = Vec::with_capacity(self.plan.residual.len());
        let mut offset = 0;
        for range in &self.plan.residual {
            let mut crc = crc32fast::Hasher::new();
            for slice in self.slices(range, bytes)? {
                crc.update(slice);
                out.write_all(slice).map_err(io)?;
                progress.advance(slice.len() as u64);
            }
            let size = range.end - range.start;
            extents.push(ResidualExtent {
                ptr: range.start,
                size,
                allocation_ptr: allocation_of(entries, range.start),
                offset,
                crc32: crc.finalize(),
                placement: Some(Placement::Mapped),
            });
            offset += size;
        }
        out.flush().map_err(io)?;
        Ok(extents)
    }

    fn recovery(
        &self,
        request: &CaptureRequest<'_>,
        native: &NativeManifest,
    ) -> Result<RecoveryManifest, CaptureError> {
        if self.kept.is_some() {
            // Where the bytes of a kept payload come from: as the earlier capsule says.
            let dir = request.container_root.join(capsule::worker_dir(&self.id));
            let earlier = RecoveryManifest::read(&dir.join(capsule::RECOVERY_MANIFEST_NAME))?;
            return Ok(RecoveryManifest::from_native(
                native,
                earlier.model_source,
                earlier.recovery_sources,
            )?);
        }
        let source = |extent: &content_match::ModelExtent, checkpoint: &Checkpoint| RecoverySource {
            semantic_id: semantic_id::named(&extent.members),
            pieces: extent
                .pieces
                .iter()
                .map(|piece| RecoveryPiece {
                    file: checkpoint.files()[piece.file_index].name.clone(),
                    tensor: piece.tensor.clone(),
                    file_offset: piece.file_offset,
                    length: piece.length,
                    extent_offset: piece.extent_offset,
                })
                .collect(),
        };
        let sources = request.checkpoint.map(|c| self.model.iter().map(|e| source(e, c)).collect());
        let model_source = request.model_source.clone().filter(|_| !self.model.is_empty());
        Ok(RecoveryManifest::from_native(native, model_source, sources.unwrap_or_default())?)
    }

    /// Maximal ranges that are mapped as a whole: the allocations of the manifest.
    fn entries(&self) -> Vec<Entry> {
        let kept = self.kept.iter().flat_map(|k| k.extents.iter().map(|e| e.ptr..e.ptr + e.size));
        let mut ranges: Vec<Range<u64>> =
            self.plan.model.iter().chain(&self.plan.residual).cloned().chain(kept).collect();
        ranges.sort_unstable_by_key(|r| r.start);
        let mut entries: Vec<Entry> = Vec::new();
        for range in ranges {
            match entries.last_mut() {
                Some(last) if last.ptr + last.size == range.start => last.size += range.end - range.start,
                _ => entries.push(Entry {
                    ptr: range.start,
                    size: range.end - range.start,
                    tag: WEIGHTS.to_owned(),
                }),
            }
        }
        entries
    }

    /// The bytes of a range that is present as a whole.
    fn slices<'b>(
        &'b self,
        range: &Range<u64>,
        bytes: &BTreeMap<u32, &'b [u8]>,
    ) -> Result<Vec<&'b [u8]>, CaptureError> {
        let runs = &self.memory.runs;
        let first = runs.partition_point(|run| run.end <= range.start);
        let mut slices = Vec::new();
        let mut at = range.start;
        for run in runs[first..].iter().take_while(|run| run.start < range.end) {
            let part = sub_run(run, at.max(run.start), run.end.min(range.end));
            if part.start == at {
                slices.extend(bytes_of(self.process, bytes, &part));
                at = part.end;
            }
        }
        if at != range.end || slices.iter().map(|s| s.len() as u64).sum::<u64>() != range.end - range.start {
            return Err(CaptureError::NotPresent {
                pid: self.process.pid,
                start: range.start,
                end: range.end,
            });
        }
        Ok(slices)
    }

    /// A mapping may not cross the border of a memory area.
    fn mappings(&self, range: &Range<u64>, file: u32, offset: u64) -> Vec<Mapping> {
        let areas = self.memory.vmas.iter().filter(|v| crate::criu::runs::is_convertible(v));
        areas
            .filter(|v| v.start() < range.end && range.start < v.end())
            .map(|v| {
                let start = v.start().max(range.start);
                Mapping { start, end: v.end().min(range.end), file, offset: offset + (start - range.start) }
            })
            .collect()
    }
}

fn find_model(
    process: &ProcessImages,
    memory: &ProcessMemory,
    earlier: &Earlier,
    matcher: &ContentMatcher<'_>,
    elsewhere: &[MatchedRun],
) -> Result<(Vec<content_match::ModelExtent>, Vec<MatchedRun>), CaptureError> {
    let bytes = earlier.bytes();
    let mut regions: Vec<MemoryRegion<'_>> = Vec::new();
    let mut previous: Option<crate::criu::runs::PageRun> = None;
    for run in memory
        .runs
        .iter()
        .filter(|r| r.vma.is_some_and(|i| crate::criu::runs::is_convertible(&memory.vmas[i])))
    {
        // Runs that lie side by side in memory and in their source are one region: matches cross their border.
        let joined = previous.filter(|p| p.end == run.start && sub_run(p, p.end, p.end).source == run.source);
        let start = joined.map_or(run.start, |p| p.start);
        let whole =
            crate::criu::runs::PageRun { start, source: joined.map_or(run.source, |p| p.source), ..*run };
        let Some(data) = bytes_of(process, &bytes, &whole) else { continue };
        if joined.is_some() {
            regions.pop();
        }
        regions.push(MemoryRegion { address: start, data });
        previous = Some(whole);
    }
    let runs = matcher.find_beside(&regions, elsewhere)?.runs;
    let extents = content_match::model_extents(&runs, matcher.checkpoint(), &regions, PAGE_SIZE)?;
    Ok((extents, runs))
}

/// A second copy of the same tensors has the same semantic id; ids name an extent, so only the first copy is the
/// model's, the others are ordinary memory.
fn distinct(model: Vec<content_match::ModelExtent>) -> Vec<content_match::ModelExtent> {
    let mut seen = std::collections::BTreeSet::new();
    model.into_iter().filter(|extent| seen.insert(semantic_id::named(&extent.members))).collect()
}

fn with_allocation(mut extent: ModelExtent, entries: &[Entry]) -> ModelExtent {
    extent.allocation_ptr = allocation_of(entries, extent.ptr);
    extent
}

fn allocation_of(entries: &[Entry], address: u64) -> u64 {
    let behind = entries.partition_point(|e| e.ptr <= address);
    entries[..behind].last().map_or(0, |e| e.ptr)
}

fn total(ranges: &[Range<u64>]) -> u64 {
    ranges.iter().map(|r| r.end - r.start).sum()
}
