//! The package of a job: the files that Ray unpacks on every node, into the folder in which the job starts.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Cursor, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use accelerator_host::cli::{Error, Result};
use zip::write::SimpleFileOptions;
use zip::{DateTime, ZipWriter};

use super::gang::DRIVER;
use crate::spec::{JobSpec, launcher_here};

const DRIVER_FILE: &str = "gang.py";

/// A package, which is named by its content.
pub(super) struct Package {
    /// Its name, in the form of Ray's own packages.
    pub(super) name: String,
    pub(super) bytes: Vec<u8>,
    /// Its files with their sizes.
    pub(super) files: BTreeMap<String, u64>,
    /// The path of the launcher for the driver on a node.
    pub(super) launcher: String,
    /// The path of the program for the driver on a node.
    pub(super) program: String,
}

impl Package {
    /// Builds the package of a job: the driver, the launcher, the program if it is a file, and the files of `--ray-include`.
    ///
    /// # Errors
    /// When a file is not there, or two have one name.
    pub(super) fn build(spec: &JobSpec) -> Result<Self> {
        let mut sources = Sources::default();
        let launcher = launcher_here()?;
        // A name without a slash is a program of the nodes, such as `sh`.
        let word = spec.program.first().map_or("", String::as_str);
        let program = word
            .contains('/')
            .then(|| spec.program_file())
            .transpose()?;
        let on_node = match spec.options.ray.no_upload {
            true => |_: &mut Sources, path: &Path| Ok(path.to_string_lossy().into_owned()),
            false => Sources::add_file,
        };
        let launcher = on_node(&mut sources, &launcher)?;
        let program = match program {
            Some(program) => on_node(&mut sources, &program)?,
            None => word.to_owned(),
        };
        for path in &spec.options.ray.ray_include {
            sources.include(path)?;
        }
        sources.pack(launcher, program)
    }

    /// Returns the address from which nodes fetch it.
    pub(super) fn uri(&self) -> String {
        format!("gcs://{}", self.name)
    }
}

/// The files of a package by their names in it.
#[derive(Default)]
struct Sources(BTreeMap<String, PathBuf>);

impl Sources {
    /// Adds a program, and returns its path in the package.
    fn add_file(&mut self, path: &Path) -> Result<String> {
        Ok(format!("./{}", self.add(path, Path::new(""))?))
    }

    fn add(&mut self, path: &Path, folder: &Path) -> Result<String> {
        let name = path.file_name().map(|name| folder.join(name));
        let name = name.as_deref().and_then(Path::to_str).ok_or_else(|| {
            Error::usage(format!(
                "{} has no name that a package can have",
                path.display()
            ))
        })?;
        let taken = name == DRIVER_FILE || self.0.contains_key(name);
        if taken && self.0.get(name).is_none_or(|other| other != path) {
            return Err(Error::usage(format!(
                "two files of the job are called {name}; rename {}, or leave it out",
                path.display()
            )));
        }
        self.0.insert(name.to_owned(), path.to_owned());
        Ok(name.to_owned())
    }

    /// Adds a file, or a folder with its contents, by its own name.
    fn include(&mut self, path: &Path) -> Result<()> {
        let failed = |path: &Path, error| {
            Error::usage(format!("--ray-include {} cannot be read", path.display()))
                .with_source(error)
        };
        let path = path.canonicalize().map_err(|error| failed(path, error))?;
        let mut open = vec![(path, PathBuf::new())];
        while let Some((path, folder)) = open.pop() {
            let kind = fs::symlink_metadata(&path).map_err(|error| failed(&path, error))?;
            if !kind.is_dir() {
                self.add(&path, &folder)?;
                continue;
            }
            let folder = path
                .file_name()
                .map_or(folder.clone(), |name| folder.join(name));
            for entry in fs::read_dir(&path).map_err(|error| failed(&path, error))? {
                let entry = entry.map_err(|error| failed(&path, error))?;
                open.push((entry.path(), folder.clone()));
            }
        }
        Ok(())
    }

    /// Packs the files: the same files give the same package.
    fn pack(self, launcher: String, program: String) -> Result<Package> {
        let failed = |error: io::Error| {
            Error::system("the package of the job cannot be made").with_source(error)
        };
        let mut archive = ZipWriter::new(Cursor::new(Vec::new()));
        let mut files = BTreeMap::new();
        let mut add = |name: &str, mode: u32, content: &[u8]| {
            let options = SimpleFileOptions::default()
                .last_modified_time(DateTime::default())
                .unix_permissions(mode);
            archive.start_file(name, options).map_err(io::Error::from)?;
            archive.write_all(content)?;
            files.insert(name.to_owned(), content.len() as u64);
            Ok(())
        };
        add(DRIVER_FILE, 0o644, DRIVER.as_bytes()).map_err(failed)?;
        for (name, path) in &self.0 {
            let read = || -> io::Result<_> {
                Ok((
                    fs::metadata(path)?.permissions().mode() & 0o777,
                    fs::read(path)?,
                ))
            };
            let (mode, content) = read().map_err(|error| {
                Error::usage(format!("{} cannot be read", path.display())).with_source(error)
            })?;
            add(name, mode, &content).map_err(failed)?;
        }
        let bytes = archive
            .finish()
            .map_err(|error| failed(error.into()))?
            .into_inner();
        let hash = blake3::hash(&bytes).to_hex();
        Ok(Package {
            name: format!("_ray_pkg_{}.zip", &hash[..40]),
            bytes,
            files,
            launcher,
            program,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_files_give_the_same_package() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("train");
        fs::write(&program, "x").unwrap();
        fs::create_dir_all(folder.path().join("data/a")).unwrap();
        fs::write(folder.path().join("data/a/b"), "y").unwrap();
        let pack = || {
            let mut sources = Sources::default();
            sources.add_file(&program).unwrap();
            sources.include(&folder.path().join("data")).unwrap();
            sources.pack(String::new(), String::new()).unwrap()
        };
        let package = pack();
        assert_eq!(
            package.files.keys().collect::<Vec<_>>(),
            ["data/a/b", DRIVER_FILE, "train"]
        );
        assert_eq!(package.name, pack().name);
        fs::write(&program, "z").unwrap();
        assert_ne!(package.name, pack().name);
    }

    #[test]
    fn two_files_of_one_name_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let mut sources = Sources::default();
        let driver = folder.path().join(DRIVER_FILE);
        fs::write(&driver, "").unwrap();
        let error = sources.include(&driver).unwrap_err();
        assert!(error.to_string().contains("called gang.py"), "{error}");
        fs::create_dir(folder.path().join("a")).unwrap();
        for name in ["train", "a/train"] {
            fs::write(folder.path().join(name), "").unwrap();
        }
        sources.include(&folder.path().join("train")).unwrap();
        sources.include(&folder.path().join("train")).unwrap();
        let error = sources.include(&folder.path().join("a/train")).unwrap_err();
        assert!(error.to_string().contains("called train"), "{error}");
    }
}
