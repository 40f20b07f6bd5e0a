//! When a payload is rebuilt: what the container asks for, what the node says, what the engine allows.

use std::str::FromStr;

use crate::capsule;
use crate::config::MaterializeMode;
use crate::format::artifact::{Artifact, DriverId};

/// A mode that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ModeError {
    /// The annotation has another value.
    #[error("annotation {} is {found:?}: expected off, async or required", capsule::MATERIALIZE_ANNOTATION)]
    Unknown {
        /// It.
        found: String,
    },
    /// The engine's packs do not follow from a checkpoint.
    #[error(
        "materialization {} is not possible for an SGLang artifact ({engine}): its pack is not canonical across \
         captures, so that it can be staged or imported but not rebuilt from the checkpoint; use off",
        name(*.mode)
    )]
    Rejected {
        /// The engine of the artifact.
        engine: String,
        /// What was asked for.
        mode: MaterializeMode,
    },
}

impl ModeError {
    /// The stable name of the kind of error.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Unknown { .. } => "Malformed",
            Self::Rejected { .. } => "MaterializeRejected",
        }
    }
}

/// How a mode is written.
pub const fn name(mode: MaterializeMode) -> &'static str {
    match mode {
        MaterializeMode::Off => "off",
        MaterializeMode::Async => "async",
        MaterializeMode::Required => "required",
    }
}

impl FromStr for MaterializeMode {
    type Err = ModeError;

    fn from_str(text: &str) -> Result<Self, ModeError> {
        match text {
            "off" => Ok(Self::Off),
            "async" => Ok(Self::Async),
            "required" => Ok(Self::Required),
            other => Err(ModeError::Unknown { found: other.to_owned() }),
        }
    }
}

/// The mode of a start: the container's annotation, else the node's configuration, else the engine's default.
///
/// # Errors
/// An SGLang artifact with another mode than off.
pub fn resolve(
    annotation: Option<MaterializeMode>,
    configured: Option<MaterializeMode>,
    artifact: &Artifact,
) -> Result<MaterializeMode, ModeError> {
    let asked = annotation.or(configured);
    let engine = &artifact.launch.engine;
    match asked {
        Some(mode) if mode != MaterializeMode::Off && is_sglang(engine) => {
            Err(ModeError::Rejected { engine: engine.clone(), mode })
        }
        Some(mode) => Ok(mode),
        None => Ok(default_of(artifact)),
    }
}

/// `async` for vLLM and for the `host` driver, `off` for SGLang and for what is not known.
fn default_of(artifact: &Artifact) -> MaterializeMode {
    let engine = artifact.launch.engine.to_ascii_lowercase();
    match artifact.snapshot_driver.id {
        _ if is_sglang(&engine) => MaterializeMode::Off,
        DriverId::Host => MaterializeMode::Async,
        _ if engine.starts_with("vllm") => MaterializeMode::Async,
        _ => MaterializeMode::Off,
    }
}

fn is_sglang(engine: &str) -> bool {
    engine.to_ascii_lowercase().starts_with("sglang")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn artifact(sample: &str, engine: &str) -> Artifact {
        let mut artifact = Artifact::parse(sample.as_bytes()).unwrap();
        engine.clone_into(&mut artifact.launch.engine);
        artifact
    }

    #[test]
    fn annotation_before_configuration_before_the_engines_default() {
        use MaterializeMode::{Async, Off, Required};
        let host = include_str!("../../tests/samples/artifact-host.json");
        let n580 = include_str!("../../tests/samples/artifact-n580.json");
        for (sample, engine, annotation, configured, expected) in [
            (host, "llama-server", None, None, Ok(Async)),
            (host, "llama-server", None, Some(Off), Ok(Off)),
            (host, "llama-server", Some(Required), Some(Off), Ok(Required)),
            (host, "llama-server", Some(Off), Some(Required), Ok(Off)),
            (host, "sglang", None, None, Ok(Off)),
            (host, "SGLang", Some(Off), Some(Async), Ok(Off)),
            (host, "sglang", Some(Async), None, Err(Async)),
            (host, "sglang_router", None, Some(Required), Err(Required)),
            (n580, "vllm", None, None, Ok(Async)),
            (n580, "vLLM", None, Some(Required), Ok(Required)),
            (n580, "sglang", None, None, Ok(Off)),
            (n580, "sglang", Some(Required), Some(Off), Err(Required)),
            (n580, "another", None, None, Ok(Off)),
        ] {
            let found = resolve(annotation, configured, &artifact(sample, engine));
            let expected = expected.map_err(|mode| ModeError::Rejected { engine: engine.to_owned(), mode });
            assert_eq!(found, expected, "{engine} {annotation:?} {configured:?}");
        }
    }

    #[test]
    fn an_sglang_artifact_rejects_with_the_reason() {
        let sample = artifact(include_str!("../../tests/samples/artifact-n580.json"), "sglang");
        let error = resolve(Some(MaterializeMode::Async), None, &sample).unwrap_err();
        assert_eq!(error.kind(), "MaterializeRejected");
        for said in ["SGLang", "async", "not canonical across captures", "use off"] {
            assert!(error.to_string().contains(said), "{error}");
        }
    }

    #[test]
    fn annotations_are_strict() {
        for mode in [MaterializeMode::Off, MaterializeMode::Async, MaterializeMode::Required] {
            assert_eq!(name(mode).parse(), Ok(mode));
        }
        for text in ["", "Async", "on", "required "] {
            let error = text.parse::<MaterializeMode>().unwrap_err();
            assert!(error.to_string().contains("expected off, async or required"), "{error}");
        }
    }
}
