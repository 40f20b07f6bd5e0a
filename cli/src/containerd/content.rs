//! Content: blobs by digest.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use coldsnap::digest::Digest;
use containerd_client::services::v1 as api;
use tonic::Code;

use super::{Containerd, ContainerdError, failed};

/// Bytes per message of a write; containerd's limit for a message is 16 MiB.
const CHUNK: u64 = 1 << 20;
/// Manifests and configurations are read whole; anything larger is not one.
const MAX_DOCUMENT: usize = 8 << 20;

/// A blob that lies in the content store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Blob {
    /// Its digest.
    pub digest: Digest,
    /// Its size in bytes.
    pub size: u64,
}

impl Containerd {
    fn content(&self) -> api::content_client::ContentClient<tonic::transport::Channel> {
        api::content_client::ContentClient::new(self.channel.clone())
    }

    /// A manifest, index or configuration.
    ///
    /// # Errors
    /// When it is not there, too large, or its bytes do not have the digest.
    pub async fn read_document(&self, digest: &str) -> Result<Vec<u8>, ContainerdError> {
        let mut bytes = Vec::new();
        let too_large = || std::io::Error::other(format!("more than {MAX_DOCUMENT} bytes"));
        self.read_blob(digest, |part| {
            bytes.extend_from_slice(part);
            if bytes.len() > MAX_DOCUMENT { Err(too_large()) } else { Ok(()) }
        })
        .await?;
        let found = Digest::of(&bytes).to_string();
        if found != digest {
            let action = format!("read content {digest}");
            return Err(ContainerdError::Answer { action, reason: format!("its digest is {found}") });
        }
        Ok(bytes)
    }

    /// A blob of any size, in pieces. The digest is not compared; containerd did when it was written.
    ///
    /// # Errors
    /// When it is not there, or `sink` fails.
    pub async fn read_blob(
        &self,
        digest: &str,
        mut sink: impl FnMut(&[u8]) -> std::io::Result<()>,
    ) -> Result<(), ContainerdError> {
        let action = format!("read content {digest}");
        let request = api::ReadContentRequest { digest: digest.to_owned(), offset: 0, size: 0 };
        let mut stream =
            self.content().read(self.request(request)).await.map_err(failed(action.clone()))?.into_inner();
        while let Some(part) = stream.message().await.map_err(failed(action.clone()))? {
            sink(&part.data).map_err(|source| ContainerdError::Io { path: digest.to_owned(), source })?;
        }
        Ok(())
    }

    /// Labels of a blob.
    ///
    /// # Errors
    /// When it is not there or the request fails.
    pub async fn content_labels(&self, digest: &str) -> Result<HashMap<String, String>, ContainerdError> {
        let request = api::InfoRequest { digest: digest.to_owned() };
        let answer = self
            .content()
            .info(self.request(request))
            .await
            .map_err(failed(format!("describe content {digest}")))?;
        Ok(answer.into_inner().info.map(|i| i.labels).unwrap_or_default())
    }

    /// Writes a document.
    ///
    /// # Errors
    /// When the request fails.
    pub async fn write_document(
        &self,
        bytes: &[u8],
        labels: HashMap<String, String>,
    ) -> Result<Blob, ContainerdError> {
        let blob = Blob { digest: Digest::of(bytes), size: bytes.len() as u64 };
        self.write_blob(&blob, std::io::Cursor::new(bytes.to_vec()), labels).await?;
        Ok(blob)
    }

    /// Writes the file at `path`, whose digest and size are `blob`.
    ///
    /// # Errors
    /// When the file cannot be read, has other bytes, or the request fails.
    pub async fn write_file(
        &self,
        path: &Path,
        blob: &Blob,
        labels: HashMap<String, String>,
    ) -> Result<(), ContainerdError> {
        let file = File::open(path)
            .map_err(|source| ContainerdError::Io { path: path.display().to_string(), source })?;
        self.write_blob(blob, file, labels).await
    }

    async fn write_blob(
        &self,
        blob: &Blob,
        source: impl Read + Send + 'static,
        labels: HashMap<String, String>,
    ) -> Result<(), ContainerdError> {
        let action = format!("write content {}", blob.digest);
        let total = i64::try_from(blob.size).map_err(|_| ContainerdError::Answer {
            action: action.clone(),
            reason: "it is too large".into(),
        })?;
        let ref_ = format!("coldsnap-{}", blob.digest.hex());
        let chunks =
            Chunks { source, offset: 0, commit: Some((total, blob.digest.to_string(), labels)), ref_ };
        let mut answers = match self.content().write(self.request(tokio_stream::iter(chunks))).await {
            Ok(answers) => answers.into_inner(),
            Err(status) if status.code() == Code::AlreadyExists => return Ok(()),
            Err(status) => return Err(failed(action)(status)),
        };
        let mut committed = false;
        loop {
            match answers.message().await {
                Ok(Some(answer)) => committed |= answer.action == api::WriteAction::Commit as i32,
                Ok(None) => break,
                Err(status) if status.code() == Code::AlreadyExists => return Ok(()),
                Err(status) => return Err(failed(action)(status)),
            }
        }
        if committed {
            Ok(())
        } else {
            Err(ContainerdError::Answer { action, reason: "the write was not committed".into() })
        }
    }
}

/// The messages of one write: the data in order, then the commit. A read error ends the data without a
/// commit, which the caller reports.
struct Chunks<R> {
    source: R,
    offset: i64,
    commit: Option<(i64, String, HashMap<String, String>)>,
    ref_: String,
}

impl<R: Read> Iterator for Chunks<R> {
    type Item = api::WriteContentRequest;

    fn next(&mut self) -> Option<Self::Item> {
        let (total, expected, _) = self.commit.as_ref()?;
        let mut message = api::WriteContentRequest {
            action: api::WriteAction::Write as i32,
            r#ref: self.ref_.clone(),
            total: *total,
            expected: expected.clone(),
            offset: self.offset,
            ..Default::default()
        };
        let mut data = Vec::new();
        if let Err(error) = (&mut self.source).take(CHUNK).read_to_end(&mut data) {
            tracing::error!(%error, "reading the content to write failed");
            self.commit = None;
            return None;
        }
        if data.is_empty() {
            let (_, _, labels) = self.commit.take()?;
            message.action = api::WriteAction::Commit as i32;
            message.labels = labels;
        } else {
            self.offset += i64::try_from(data.len()).ok()?;
            message.data = data;
        }
        Some(message)
    }
}
