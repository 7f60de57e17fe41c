//! MLflow's registry of models.

use serde_json::{Value, json};

use super::client::member;
use super::server_run::MlflowRun;
use crate::error::{Error, Kind, Result};

impl MlflowRun {
    /// Makes a folder of the run's artifacts a version of a registered model, which is made where it is not there, and
    /// says which. The same folder of the same run is one version, however often it is registered.
    ///
    /// # Errors
    ///
    /// If the server refuses the name, or cannot be asked.
    ///
    /// See [`MlflowRun`] for an example.
    pub fn register_model(&self, model: &str, path: &str) -> Result<u64> {
        let body = json!({ "name": model });
        let server = &self.server;
        server.create_once(
            || match server.get("registered-models/get", &[("name", model)]) {
                Ok(_) => Ok(Some(())),
                Err(failure) if failure.is("RESOURCE_DOES_NOT_EXIST") => Ok(None),
                Err(failure) => Err(failure.into()),
            },
            "registered-models/create",
            &body,
            |_| Ok(()),
        )?;
        let source = format!("{}/{path}", self.artifact_uri);
        let body = json!({ "name": model, "source": source, "run_id": self.id() });
        server.create_once(
            || self.find_version(model, &source),
            "model-versions/create",
            &body,
            |answer| version(answer.get("model_version").unwrap_or(answer)),
        )
    }

    /// Gives a version of a registered model an alias, as `best`. It is taken from the version that has it.
    ///
    /// # Errors
    ///
    /// If the server refuses the alias, or cannot be asked.
    ///
    /// See [`MlflowRun`] for an example.
    pub fn set_model_alias(&self, model: &str, alias: &str, version: u64) -> Result<()> {
        let body = json!({ "name": model, "alias": alias, "version": version.to_string() });
        self.server.post("registered-models/alias", &body)?;
        Ok(())
    }

    fn find_version(&self, model: &str, source: &str) -> Result<Option<u64>> {
        let filter = format!("run_id = '{}'", self.id());
        let query = [("filter", filter.as_str()), ("max_results", "1000")];
        let answer = self.server.get("model-versions/search", &query)?;
        let versions = answer.get("model_versions").and_then(Value::as_array);
        for found in versions.into_iter().flatten() {
            if member(found, "/name")? == model && member(found, "/source")? == source {
                return version(found).map(Some);
            }
        }
        Ok(None)
    }
}

fn version(found: &Value) -> Result<u64> {
    let text = member(found, "/version")?;
    text.parse().map_err(|_| {
        let message =
            format!("expected the number of a model's version in MLflow's answer, found {text:?}");
        Error::new(Kind::Remote, message)
    })
}
