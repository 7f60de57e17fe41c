use std::path::PathBuf;

use accelerator::{Accelerator, Tracker};
use serde::Serialize;

use crate::course::Course;

/// The trackers that record a training; without a flag, none.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct TrackArgs {
    /// Record the training as a run of this name in the folder `runs`
    #[arg(long, value_name = "NAME")]
    pub track: Option<String>,

    /// Write event files for TensorBoard below this folder; without --track, the run has the program's name
    #[arg(long, value_name = "DIR")]
    pub log_dir: Option<PathBuf>,
}

impl TrackArgs {
    /// Returns the tracker for [`AcceleratorBuilder::log_with`](accelerator::AcceleratorBuilder::log_with).
    pub fn trackers(&self) -> Option<Tracker> {
        self.log_dir.clone().map(Tracker::TensorBoardIn)
    }

    /// Begins the run, or resumes it, if a flag asks for one.
    ///
    /// # Errors
    ///
    /// The errors of [`Accelerator::init_trackers`].
    #[track_caller]
    pub fn begin(
        &self,
        accelerator: &Accelerator,
        hyperparameters: &impl Serialize,
    ) -> accelerator::Result<()> {
        let program = || {
            let program = std::env::current_exe().ok()?;
            Some(program.file_stem()?.to_string_lossy().into_owned())
        };
        match (&self.track, &self.log_dir) {
            (None, None) => Ok(()),
            (Some(name), _) => accelerator.init_trackers(name, hyperparameters),
            (None, Some(_)) => {
                let name = program().unwrap_or_else(|| "training".to_owned());
                accelerator.init_trackers(&name, hyperparameters)
            }
        }
    }

    /// Begins the run, and returns a course whose values it records as the series `kind/loss`.
    ///
    /// # Errors
    ///
    /// The errors of [`Accelerator::init_trackers`].
    #[track_caller]
    pub fn course(
        &self,
        accelerator: &Accelerator,
        kind: &str,
        hyperparameters: &impl Serialize,
    ) -> accelerator::Result<Course> {
        self.begin(accelerator, hyperparameters)?;
        Ok(Course::tracked(accelerator, kind))
    }
}
