use std::fmt;
use std::fs;
use std::path::Path;

use serde_json::{Map, Value};

use super::csv;
use crate::error::{Error, Result};

/// A table of results: a row for each trial.
#[derive(Clone, Debug, PartialEq)]
pub struct DataFrame {
    columns: Vec<String>,
    /// The rows, with null for each missing value.
    rows: Vec<Vec<Value>>,
}

impl DataFrame {
    /// Creates a table of rows with named values; columns are in the order in which they first appear.
    pub(super) fn new(rows: Vec<Vec<(String, Value)>>) -> Self {
        let mut columns: Vec<String> = Vec::new();
        for (name, _) in rows.iter().flatten() {
            if !columns.contains(name) {
                columns.push(name.clone());
            }
        }
        let rows = rows.into_iter().map(|row| {
            let value = |column: &String| {
                let found = row.iter().find(|(name, _)| name == column);
                found.map_or(Value::Null, |(_, value)| value.clone())
            };
            columns.iter().map(value).collect()
        });
        let rows = rows.collect();
        Self { columns, rows }
    }

    /// The names of columns: metrics by their names, parameters as `config/lr`.
    #[must_use]
    pub fn columns(&self) -> &[String] {
        &self.columns
    }

    /// The rows, each with a value for every column.
    #[must_use]
    pub fn rows(&self) -> &[Vec<Value>] {
        &self.rows
    }

    /// Writes comma-separated values.
    ///
    /// # Errors
    /// [`Error::is_io`] where the file cannot be written.
    pub fn to_csv(&self, path: impl AsRef<Path>) -> Result<()> {
        write(path.as_ref(), &self.to_string())
    }

    /// Writes a JSON array of objects.
    ///
    /// # Errors
    /// [`Error::is_io`] where the file cannot be written.
    pub fn to_json(&self, path: impl AsRef<Path>) -> Result<()> {
        write(path.as_ref(), &format!("{}\n", self.json()))
    }

    /// A JSON array of objects, without what is missing.
    #[must_use]
    pub fn json(&self) -> Value {
        let object = |row: &Vec<Value>| {
            let fields = self.columns.iter().cloned().zip(row.iter().cloned());
            Value::Object(
                fields
                    .filter(|(_, value)| !value.is_null())
                    .collect::<Map<_, _>>(),
            )
        };
        self.rows.iter().map(object).collect()
    }
}

/// Comma-separated values.
impl fmt::Display for DataFrame {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let header: Vec<_> = self
            .columns
            .iter()
            .map(|name| Value::from(name.as_str()))
            .collect();
        formatter.write_str(&csv::line(&header))?;
        self.rows
            .iter()
            .try_for_each(|row| formatter.write_str(&csv::line(row)))
    }
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).map_err(|error| Error::io("write", path, error))
}
