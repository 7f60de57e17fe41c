use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{Cursor, ErrorKind, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use accelerator_collective::Activity;
use burn::tensor::{Bytes, TensorData};
use safetensors::Dtype;
use safetensors::tensor::Metadata;
use serde::Deserialize;

use super::format::{
    ADAPTER_FILE, FileLayout, FileNames, LEFT_OUT, PEFT_PREFIX, burn_dtype, quantization_key,
};
use super::frozen::Hashes;
use crate::core::error::{Error, Kind, Result};

/// The most that a header may take, as in the format's own reader.
const MAX_HEADER: u64 = 100_000_000;

const BLOCK: usize = 1 << 24;

/// A model in one file or in several with an index, on disk or in memory. Opening it reads and checks the headers;
/// values are read on request.
#[derive(Debug)]
pub(crate) struct ModelFile {
    activity: Activity,
    path: PathBuf,
    files: Vec<(PathBuf, FileBytes)>,
    tensors: BTreeMap<String, StoredTensor>,
    metadata: HashMap<String, String>,
}

#[derive(Clone, Debug)]
pub(super) struct StoredTensor {
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    file: usize,
    offset: u64,
    bytes: usize,
}

/// A model file: open on disk, held in memory, or read into memory that a file may back.
#[derive(Debug)]
pub(crate) enum FileBytes {
    Disk(File),
    Memory(Arc<Vec<u8>>),
    Mapped(Bytes),
}

/// Opens the file at that path; `None` if there is none.
type Files<'a> = dyn Fn(&Path) -> Result<Option<FileBytes>> + 'a;

/// Reads the file of that name, `None` if there is none.
type ReadFile<'a> = dyn Fn(&str) -> Result<Option<FileBytes>> + 'a;

trait ReadSeek: Read + Seek {}

impl<T: Read + Seek> ReadSeek for T {}

impl FileBytes {
    fn reader(&self) -> Box<dyn ReadSeek + '_> {
        match self {
            Self::Disk(file) => Box::new(file),
            Self::Memory(bytes) => Box::new(Cursor::new(&bytes[..])),
            Self::Mapped(bytes) => Box::new(Cursor::new(&bytes[..])),
        }
    }
}

#[derive(Deserialize)]
struct FileIndex {
    weight_map: BTreeMap<String, String>,
}

impl ModelFile {
    /// Opens `path` on disk: a file, an index, or a folder with `model.safetensors` or its index, or else with PEFT's
    /// `adapter_model.safetensors`. If only the index of
    /// such a file exists, that is opened. Reading it shows `activity`.
    pub(crate) fn open(path: &Path, activity: Activity) -> Result<Self> {
        Self::assemble(&path_in(path), activity, &|path| match File::open(path) {
            Ok(file) => Ok(Some(FileBytes::Disk(file))),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(Error::io("open the model file", path, error)),
        })
    }

    /// Opens a model whose files `read` returns by name, or `None` for one that does not exist; errors name the model
    /// `path`.
    pub(crate) fn in_memory(path: &Path, activity: Activity, read: &ReadFile<'_>) -> Result<Self> {
        Self::assemble(path, activity, &|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            read(&name)
        })
    }

    fn assemble(path: &Path, activity: Activity, files: &Files<'_>) -> Result<Self> {
        let mut model = Self {
            activity,
            path: path.to_owned(),
            files: Vec::new(),
            tensors: BTreeMap::new(),
            metadata: HashMap::new(),
        };
        let is_index = path.extension().is_some_and(|kind| kind == "json");
        match files(path)? {
            Some(index) if is_index => model.add_index(&index, files)?,
            Some(file) => model.add_file(path.to_owned(), file)?,
            None => {
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                model.path.set_file_name(FileNames::new(&name).index());
                let Some(index) = files(&model.path)? else {
                    let index = model.path.display();
                    let missing = std::io::Error::new(
                        ErrorKind::NotFound,
                        format!("there is no such file, and no index `{index}`"),
                    );
                    return Err(Error::io("open the model file", path, missing));
                };
                model.add_index(&index, files)?;
            }
        }
        Ok(model)
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Returns the tensor with this name; a tied parameter has several names.
    pub(super) fn find(&self, name: &str) -> Option<(&str, &StoredTensor)> {
        let found = self.tensors.get_key_value(name).or_else(|| {
            let kept = self.metadata.get(name)?;
            self.tensors.get_key_value(kept)
        });
        found.map(|(name, stored)| (name.as_str(), stored))
    }

    /// Returns the description of the quantisation of a tensor.
    pub(super) fn quantization(&self, name: &str) -> Option<&str> {
        self.metadata
            .get(&quantization_key(name))
            .map(String::as_str)
    }

    /// Returns the hashes of the parameters that were left out, by their paths.
    pub(super) fn left_out(&self) -> Result<Hashes> {
        let hashes = self.metadata.get(LEFT_OUT).map(|json| {
            serde_json::from_str(json).map_err(|error| {
                malformed(
                    &self.path,
                    format!("its list of parameters that were left out is not valid: {error}"),
                )
            })
        });
        hashes.transpose().map(Option::unwrap_or_default)
    }

    pub(super) fn layout(&self) -> Option<FileLayout> {
        let named = self.metadata.get("layout");
        named.map_or_else(
            || {
                let is_peft = |name: &str| name.starts_with(PEFT_PREFIX);
                let mut names = self.names().peekable();
                (names.peek().is_some() && names.all(is_peft)).then_some(FileLayout::Peft)
            },
            |name| FileLayout::from_name(name),
        )
    }

    pub(super) fn read(&self, stored: &StoredTensor) -> Result<TensorData> {
        let (path, file) = &self.files[stored.file];
        let dtype = burn_dtype(stored.dtype)
            .ok_or_else(|| malformed(path, format!("Burn has no tensors of {:?}", stored.dtype)))?;
        let mut bytes = vec![0; stored.bytes];
        let mut file = file.reader();
        file.seek(SeekFrom::Start(stored.offset))
            .and_then(|_| {
                bytes.chunks_mut(BLOCK).try_for_each(|block| {
                    self.activity.keep_alive();
                    file.read_exact(block)
                })
            })
            .map_err(|error| Error::io("read the model file", path, error))?;
        Ok(TensorData::from_bytes_vec(
            bytes,
            stored.shape.clone(),
            dtype,
        ))
    }

    /// Adds the shards that the index of `self.path` names.
    fn add_index(&mut self, index: &FileBytes, files: &Files<'_>) -> Result<()> {
        let path = self.path.clone();
        let path = &*path;
        let mut text = Vec::new();
        index
            .reader()
            .read_to_end(&mut text)
            .map_err(|error| Error::io("read the model's index", path, error))?;
        let index: FileIndex = serde_json::from_slice(&text)
            .map_err(|error| malformed(path, format!("it is not an index of shards: {error}")))?;
        let mut shards: Vec<&str> = index.weight_map.values().map(String::as_str).collect();
        shards.sort_unstable();
        shards.dedup();
        for shard in &shards {
            if Path::new(shard).file_name() != Some(shard.as_ref()) {
                return Err(malformed(
                    path,
                    format!("it names the shard {shard:?}; expected the name of a file beside it"),
                ));
            }
            let place = path.with_file_name(shard);
            let Some(file) = files(&place)? else {
                return Err(malformed(path, format!("its shard `{shard}` is missing")));
            };
            self.add_file(place, file)?;
        }
        for (name, shard) in &index.weight_map {
            let place = self.tensors.get(name).map(|stored| shards[stored.file]);
            if place != Some(shard.as_str()) {
                return Err(malformed(
                    path,
                    format!("it has `{name}` in the shard `{shard}`, which has not"),
                ));
            }
        }
        Ok(())
    }

    fn add_file(&mut self, path: PathBuf, file: FileBytes) -> Result<()> {
        let (start, metadata) = read_header(&path, &mut *file.reader())?;
        let number = self.files.len();
        for (name, info) in metadata.tensors() {
            let (from, to) = info.data_offsets;
            let stored = StoredTensor {
                dtype: info.dtype,
                shape: info.shape.clone(),
                file: number,
                offset: start + from as u64,
                bytes: to - from,
            };
            if self.tensors.insert(name.clone(), stored).is_some() {
                return Err(malformed(
                    &path,
                    format!("it has `{name}`, as another shard has"),
                ));
            }
        }
        self.metadata
            .extend(metadata.metadata().clone().unwrap_or_default());
        self.files.push((path, file));
        Ok(())
    }
}

/// Returns `true` for a folder with PEFT's files and no model.
pub(crate) fn has_adapters_alone(folder: &Path) -> bool {
    let model = FileNames::new("model.safetensors");
    let has = |name: &str| folder.join(name).is_file();
    has(ADAPTER_FILE) && !has(&model.single) && !has(&model.index())
}

fn path_in(path: &Path) -> PathBuf {
    match path.is_dir() {
        true if has_adapters_alone(path) => path.join(ADAPTER_FILE),
        true => path.join("model.safetensors"),
        false => path.to_owned(),
    }
}

/// Reads where the data of a file begins, and its header, checked against its length.
fn read_header(path: &Path, file: &mut dyn ReadSeek) -> Result<(u64, Metadata)> {
    let unreadable = |error| Error::io("read the model file", path, error);
    let length = file.seek(SeekFrom::End(0)).map_err(unreadable)?;
    file.rewind().map_err(unreadable)?;
    let mut size = [0; 8];
    if length < 8 {
        return Err(malformed(
            path,
            format!("it has {length} bytes, and a safetensors file at least 8"),
        ));
    }
    file.read_exact(&mut size).map_err(unreadable)?;
    let size = u64::from_le_bytes(size);
    if size > MAX_HEADER.min(length - 8) {
        return Err(malformed(
            path,
            format!("it announces a header of {size} bytes, and has {length} bytes in all"),
        ));
    }
    let mut header = vec![0; size as usize];
    file.read_exact(&mut header).map_err(unreadable)?;
    let metadata: Metadata = serde_json::from_slice(&header)
        .map_err(|error| malformed(path, format!("its header is not valid: {error}")))?;
    let start = 8 + size;
    let expected = start.saturating_add(metadata.data_len() as u64);
    if expected != length {
        return Err(malformed(
            path,
            format!(
                "its header accounts for {expected} bytes, and it has {length}: it is cut off, or not whole"
            ),
        ));
    }
    Ok((start, metadata))
}

fn malformed(path: &Path, what: String) -> Error {
    Error::new(
        Kind::Io,
        format!("cannot read the model file `{}`", path.display()),
    )
    .with_source(what)
}
