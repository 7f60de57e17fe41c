//! Which image runs a job: one that is there, or one that is made of this machine's program.

use crate::error::{Error, Result};
use crate::image::{BuiltImage, ImageBuild, Registries};
use crate::spec::{JobSpec, launcher_here};

/// A job as pods see it, and the image that has to be pushed first.
#[derive(Debug)]
pub(super) struct JobImage {
    spec: JobSpec,
    built: Option<Built>,
}

#[derive(Debug)]
struct Built {
    image: BuiltImage,
    registries: Registries,
    reference: String,
}

impl JobImage {
    /// Makes the image, if one is to be made. It is pushed nowhere.
    ///
    /// # Errors
    /// When the program is not there, or cannot run on the base.
    pub(super) fn of(spec: &JobSpec) -> Result<Self> {
        let mut spec = spec.clone();
        let options = &spec.options.kubernetes;
        let (Some(base), Some(reference)) = (options.base_image.clone(), options.push.clone())
        else {
            return Ok(Self { spec, built: None });
        };
        if let [shell, option, _] = &spec.program[..]
            && (shell.as_str(), option.as_str()) == ("sh", "-c")
        {
            return Err(Error::usage(
                "--base-image takes a program and its arguments, a word each; a command of the shell needs --image",
            ));
        }
        let build = ImageBuild {
            program: spec.program_file()?,
            launcher: launcher_here()?,
            includes: options.include.clone(),
            base,
        };
        let registries = Registries::new(&options.insecure_registry)?;
        let image = build.build(&registries)?;
        // By its digest, so that every pod runs this very image whatever is pushed later.
        let repository = without_tag(&reference);
        spec.options.kubernetes.image = Some(format!("{repository}@{}", image.digest()));
        let program = build.program_path()?;
        if let Some(first) = spec.program.first_mut() {
            *first = program;
        }
        Ok(Self {
            spec,
            built: Some(Built {
                image,
                registries,
                reference,
            }),
        })
    }

    /// The job with its image, and with the program where that has it.
    pub(super) fn spec(&self) -> &JobSpec {
        &self.spec
    }

    /// Pushes what was made. Returns what to say of it.
    ///
    /// # Errors
    /// When the registry is not reached, or refuses it.
    pub(super) fn push(&self) -> Result<Vec<String>> {
        let Some(built) = &self.built else {
            return Ok(Vec::new());
        };
        let pushed = built.image.push(&built.registries, &built.reference)?;
        Ok(vec![format!(
            "image {} pushed as {}",
            pushed.reference_by_digest, pushed.reference
        )])
    }
}

/// `host:5000/team/mnist` of `host:5000/team/mnist:1`.
fn without_tag(reference: &str) -> &str {
    match reference.rsplit_once(':') {
        Some((repository, tag)) if !tag.contains('/') => repository,
        _ => reference,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_no_tag() {
        assert_eq!(
            without_tag("host:5000/team/mnist:1"),
            "host:5000/team/mnist"
        );
        assert_eq!(without_tag("host:5000/mnist"), "host:5000/mnist");
        assert_eq!(without_tag("mnist"), "mnist");
    }
}
