//! `accel-jobs image`.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use accelerator_host::cli::{Error, Result};
use clap::{ArgGroup, Args, Subcommand};
use serde::Serialize;

use crate::image::{BuiltImage, ImageBuild, PushedImage, Registries};
use crate::output::{json, print};
use crate::spec::{include, launcher_here};

#[derive(Debug, Subcommand)]
pub(super) enum ImageCommand {
    /// Make an image with a program as one layer on a base image, and push it or write it to a file. Needs no Docker.
    ///
    /// The image has accel-launch in /usr/local/bin and the program in /app. The same files on the same base image
    /// always give the same digest.
    Build(BuildArgs),
}

#[derive(Args, Debug)]
#[command(group = ArgGroup::new("output").required(true))]
pub(super) struct BuildArgs {
    /// The program, and more programs to put beside it.
    #[arg(value_name = "PROGRAM", required = true)]
    programs: Vec<PathBuf>,

    /// The base image: a reference, `oci-archive:FILE`, or `scratch` for programs that are linked statically.
    #[arg(long, value_name = "REF")]
    base: String,

    /// Push the image under this reference, such as registry.example/team/mnist:1.
    #[arg(long, value_name = "REF", group = "output")]
    push: Option<String>,

    /// Write the image to a file, which `ctr images import` and `docker load` accept.
    #[arg(long, value_name = "FILE", group = "output")]
    archive: Option<PathBuf>,

    /// The image's name in the file [default: localhost/PROGRAM:latest].
    #[arg(long, value_name = "REF", requires = "archive")]
    name: Option<String>,

    /// Add a file or folder to the image as /app/DEST [default: its name]; can be repeated.
    #[arg(long, value_name = "PATH[:DEST]", value_parser = include)]
    include: Vec<(PathBuf, String)>,

    /// The accel-launch to put in the image [default: the one beside accel-jobs, else the one on the PATH].
    #[arg(long, value_name = "FILE")]
    launcher: Option<PathBuf>,

    /// A registry to connect to without TLS; can be repeated.
    #[arg(long, value_name = "HOST:PORT")]
    insecure_registry: Vec<String>,

    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// The report of a build, as JSON.
#[derive(Serialize)]
struct BuildReport<'a> {
    digest: &'a str,
    layer_bytes: u64,
    seconds: f64,
    #[serde(flatten)]
    pushed: Option<PushedImage>,
    archive: Option<&'a PathBuf>,
}

pub(super) fn run(command: &ImageCommand) -> Result<ExitCode> {
    let ImageCommand::Build(arguments) = command;
    let begin = Instant::now();
    let registries = Registries::new(&arguments.insecure_registry)?;
    let built = arguments.build()?.build(&registries)?;
    let pushed = arguments.push.as_ref();
    let pushed = pushed
        .map(|reference| built.push(&registries, reference))
        .transpose()?;
    if let Some(archive) = &arguments.archive {
        built.save(&registries, archive, &arguments.archive_name()?)?;
    }
    arguments.report(&built, pushed, begin)
}

impl BuildArgs {
    fn build(&self) -> Result<ImageBuild> {
        let [program, others @ ..] = &self.programs[..] else {
            return Err(Error::usage("no program is given"));
        };
        let mut includes = self.include.clone();
        for path in others {
            includes.push(include(&path.display().to_string()).map_err(Error::usage)?);
        }
        Ok(ImageBuild {
            program: program.clone(),
            launcher: self.launcher.clone().map_or_else(launcher_here, Ok)?,
            includes,
            base: self.base.clone(),
        })
    }

    fn archive_name(&self) -> Result<String> {
        if let Some(name) = &self.name {
            return Ok(name.clone());
        }
        let program = self.programs.first().and_then(|path| path.file_name());
        let program = program.unwrap_or_default().to_string_lossy().to_lowercase();
        Ok(format!("localhost/{program}:latest"))
    }

    fn report(
        &self,
        built: &BuiltImage,
        pushed: Option<PushedImage>,
        begin: Instant,
    ) -> Result<ExitCode> {
        let seconds = begin.elapsed().as_secs_f64();
        let place = match (&pushed, &self.archive) {
            (Some(pushed), _) => pushed.reference_by_digest.clone(),
            (None, Some(archive)) => archive.display().to_string(),
            (None, None) => String::new(),
        };
        let report = BuildReport {
            digest: built.digest(),
            layer_bytes: built.layer_bytes(),
            seconds,
            pushed,
            archive: self.archive.as_ref(),
        };
        print(&match self.json {
            true => json(&report)?,
            false => format!("{place}\n"),
        })
    }
}
