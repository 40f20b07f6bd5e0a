//! What a capture needs to know of the container's OCI spec.

use coldsnap::capsule;
use serde_json::Value;

/// Facts from the spec.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpecFacts {
    /// Arguments of the process.
    pub args: Vec<String>,
    /// Its environment.
    pub env: Vec<String>,
    /// Its working directory.
    pub cwd: String,
    /// Whether it has a terminal.
    pub terminal: bool,
    /// Destinations of bind mounts, without those of payloads.
    pub binds: Vec<String>,
}

impl SpecFacts {
    /// Parses the JSON of a spec.
    ///
    /// # Errors
    /// Says what is wrong with it.
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        let spec: Value = serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
        let args = strings(&spec, "/process/args");
        if args.is_empty() {
            return Err("it has no process arguments".to_owned());
        }
        let hydration = format!("/{}/", capsule::HYDRATION_DIR);
        let mounts = spec.get("mounts").and_then(Value::as_array);
        let binds = mounts
            .into_iter()
            .flatten()
            .filter(|mount| is_bind(mount))
            .filter_map(|mount| mount.get("destination")?.as_str())
            .filter(|destination| !destination.starts_with(&hydration))
            .map(|destination| normal(destination).to_owned())
            .collect();
        Ok(Self {
            args,
            env: strings(&spec, "/process/env"),
            cwd: spec.pointer("/process/cwd").and_then(Value::as_str).unwrap_or("/").to_owned(),
            terminal: spec.pointer("/process/terminal").and_then(Value::as_bool).unwrap_or_default(),
            binds,
        })
    }
}

fn is_bind(mount: &Value) -> bool {
    let options = mount.get("options").and_then(Value::as_array);
    let mut options = options.into_iter().flatten().filter_map(Value::as_str);
    mount.get("type").and_then(Value::as_str) == Some("bind") || options.any(|o| o == "bind" || o == "rbind")
}

fn normal(destination: &str) -> &str {
    match destination.trim_end_matches('/') {
        "" => "/",
        trimmed => trimmed,
    }
}

fn strings(spec: &Value, pointer: &str) -> Vec<String> {
    let values = spec.pointer(pointer).and_then(Value::as_array);
    values.into_iter().flatten().filter_map(|v| v.as_str().map(str::to_owned)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn binds_and_process() {
        let spec = br#"{"process": {"args": ["a", "b"], "env": ["X=1"], "cwd": "/w", "terminal": true},
            "mounts": [
                {"destination": "/proc", "type": "proc"},
                {"destination": "/models/", "type": "bind", "options": ["rbind", "ro"]},
                {"destination": "/data", "type": "none", "options": ["bind"]},
                {"destination": "/opt/coldsnap/capsule/hydration/w1/model-weights.pack", "type": "bind"}]}"#;
        let facts = SpecFacts::parse(spec).unwrap();
        assert_eq!(facts.args, ["a", "b"]);
        assert_eq!(facts.binds, ["/models", "/data"]);
        assert!(facts.terminal);
        assert!(SpecFacts::parse(b"{}").is_err());
    }
}
