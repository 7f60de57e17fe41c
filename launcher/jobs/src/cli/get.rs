//! `accel-jobs get`.

use std::fmt::Write;
use std::process::ExitCode;

use clap::Args;

use super::{JobsLocation, details};
use crate::error::Result;
use crate::job::{Failure, JobDetails};
use crate::output::{age, columns, json, now, print};
use crate::spec::JobName;

#[derive(Args, Debug)]
pub(super) struct GetArgs {
    /// The job.
    name: JobName,

    /// Print JSON.
    #[arg(long)]
    json: bool,
}

pub(super) fn run(arguments: &GetArgs, location: &JobsLocation) -> Result<ExitCode> {
    let (records, mut record, engine) = location.job(&arguments.name)?;
    let details = details(&records, &mut record, engine.as_ref())?;
    print(&match arguments.json {
        true => json(&details)?,
        false => details.text(),
    })
}

impl JobDetails {
    fn text(&self) -> String {
        let or_none = |text: &Option<String>| text.clone().unwrap_or_else(|| "N/A".to_owned());
        let mut text = format!(
            "STATUS: {}\nNAMESPACE: {}\nPRIORITY: {}\nTRAINING DURATION: {}\n",
            self.status,
            or_none(&self.namespace),
            or_none(&self.priority),
            span(self.started, self.ended)
        );
        if self.restarts > 0 {
            // Writing to a string does not fail.
            let _ = writeln!(text, "RESTARTS: {}", self.restarts);
        }
        if let Some(reason) = &self.reason {
            let _ = writeln!(text, "REASON: {reason}");
        }
        let mut rows =
            vec![["NAME", "STATUS", "TRAINER", "AGE", "INSTANCE", "NODE"].map(str::to_owned)];
        rows.extend(self.instances.iter().map(|instance| {
            [
                self.name.clone(),
                instance.status.to_string(),
                self.trainer.clone(),
                span(instance.started.or(self.submitted), None),
                instance.name.clone(),
                or_none(&instance.node),
            ]
        }));
        let _ = write!(text, "\n{}", columns(&rows));
        for instance in &self.instances {
            if let Some(reason) = &instance.reason {
                let _ = writeln!(text, "{}: {reason}", instance.name);
            }
        }
        if let Some(failure) = &self.failure {
            text.push_str(&failure.text());
        }
        if let Some(address) = &self.tensorboard {
            let _ = write!(
                text,
                "\nYour tensorboard will be available on:\n{address}\n"
            );
        }
        text
    }
}

impl Failure {
    fn text(&self) -> String {
        let code = self
            .exit_code
            .map(|code| format!("exit code {code}"))
            .filter(|code| !self.reason.contains(code))
            .map(|code| format!(", {code}"))
            .unwrap_or_default();
        let instance = self
            .instance
            .as_ref()
            .map(|name| format!("{name}: "))
            .unwrap_or_default();
        let mut text = format!("\nFAILURE: {instance}{}{code}\n", self.reason);
        for line in &self.last_lines {
            // Writing to a string does not fail.
            let _ = writeln!(text, "  {line}");
        }
        text
    }
}

fn span(from: Option<u64>, to: Option<u64>) -> String {
    from.map_or_else(
        || "N/A".to_owned(),
        |from| age(to.unwrap_or_else(now).saturating_sub(from)),
    )
}
