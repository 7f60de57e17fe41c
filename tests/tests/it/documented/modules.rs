//! The modules of a crate, and what a path in one of them leads to.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use syn::{Attribute, Expr, ExprLit, Item, Lit, Meta, UseTree, Visibility};

/// All modules of a crate by their paths; the crate itself has an empty one.
pub(crate) struct Modules(BTreeMap<ModulePath, Module>);

pub(crate) type ModulePath = Vec<String>;

pub(crate) struct Module {
    pub(crate) docs: String,
    pub(crate) items: Vec<Item>,
}

/// What a `use` brings in.
pub(crate) struct Import {
    pub(crate) path: Vec<String>,
    /// None: all that is public there.
    pub(crate) name: Option<String>,
    pub(crate) is_public: bool,
}

/// What a path leads to in this crate.
pub(crate) enum Target {
    Module(ModulePath),
    Item(ModulePath, String),
}

impl Modules {
    pub(crate) fn of_crate(file: &Path) -> Self {
        let mut modules = Self(BTreeMap::new());
        let source = syn::parse_file(&fs::read_to_string(file).unwrap()).unwrap();
        modules.add(Vec::new(), docs(&source.attrs), source.items, file.parent());
        modules
    }

    /// The modules of a source without other files.
    pub(crate) fn of_source(source: &str) -> Self {
        let mut modules = Self(BTreeMap::new());
        let source = syn::parse_file(source).unwrap();
        modules.add(Vec::new(), docs(&source.attrs), source.items, None);
        modules
    }

    pub(crate) fn module(&self, path: &[String]) -> &Module {
        &self.0[path]
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&ModulePath, &Module)> {
        self.0.iter()
    }

    /// Follows a path from a module; None: it leads out of the crate.
    pub(crate) fn resolve(&self, from: &[String], path: &[String]) -> Option<Target> {
        let (last, ways) = path.split_last()?;
        let mut at = from.to_vec();
        for (index, way) in ways.iter().enumerate() {
            at = match way.as_str() {
                "crate" => Vec::new(),
                "self" => at,
                "super" => at[..at.len() - 1].to_vec(),
                name if index > 0 || self.has_name(&at, name) => self.module_named(&at, name)?,
                _ => return None,
            };
        }
        if last == "self" {
            return Some(Target::Module(at));
        }
        self.item_named(&at, last)
            .or_else(|| Some(Target::Module(self.module_named(&at, last)?)))
    }

    fn add(&mut self, path: ModulePath, docs: String, mut items: Vec<Item>, folder: Option<&Path>) {
        for item in &mut items {
            let Item::Mod(module) = item else { continue };
            if is_left_out(&module.attrs) {
                continue;
            }
            let name = module.ident.to_string();
            let path: ModulePath = path.iter().cloned().chain([name.clone()]).collect();
            let inner = folder.map(|folder| folder.join(&name));
            let outer_docs = self::docs(&module.attrs);
            match module.content.take() {
                Some((_, items)) => self.add(path, outer_docs, items, inner.as_deref()),
                None => {
                    let source = syn::parse_file(&module_text(folder.unwrap(), &name)).unwrap();
                    let docs = outer_docs + &self::docs(&source.attrs);
                    self.add(path, docs, source.items, inner.as_deref());
                }
            }
        }
        self.0.insert(path, Module { docs, items });
    }

    fn has_name(&self, at: &[String], name: &str) -> bool {
        self.module_named(at, name).is_some() || self.item_named(at, name).is_some()
    }

    fn module_named(&self, at: &[String], name: &str) -> Option<ModulePath> {
        let child: ModulePath = at.iter().cloned().chain([name.to_owned()]).collect();
        if self.0.contains_key(&child) {
            return Some(child);
        }
        match self.imported(at, name)? {
            Target::Module(path) => Some(path),
            Target::Item(..) => None,
        }
    }

    fn item_named(&self, at: &[String], name: &str) -> Option<Target> {
        let items = &self.0.get(at)?.items;
        if items
            .iter()
            .any(|item| name_of(item).is_some_and(|(own, _)| own == name))
        {
            return Some(Target::Item(at.to_vec(), name.to_owned()));
        }
        match self.imported(at, name)? {
            Target::Module(_) => None,
            item => Some(item),
        }
    }

    fn imported(&self, at: &[String], name: &str) -> Option<Target> {
        let imports: Vec<_> = self.0.get(at)?.items.iter().flat_map(imports).collect();
        let named = imports
            .iter()
            .find(|import| import.name.as_deref() == Some(name));
        // `use burn;`, and a name that is brought in under itself, lead nowhere.
        let named = named.filter(|import| import.path != [name]);
        if let Some(import) = named {
            return self.resolve(at, &import.path);
        }
        // `table` of `use table::*` itself is not looked up behind that glob.
        let globs = imports.iter().filter(|import| {
            import.name.is_none() && import.path.first().is_none_or(|first| first != name)
        });
        globs
            .into_iter()
            .find_map(|glob| match self.resolve(at, &glob.path)? {
                Target::Module(path) if path != at => self.item_named(&path, name),
                _ => None,
            })
    }
}

/// What a `use` item brings in; nothing, for another item.
pub(crate) fn imports(item: &Item) -> Vec<Import> {
    let mut found = Vec::new();
    if let Item::Use(item) = item
        && !is_left_out(&item.attrs)
    {
        flatten(
            &item.tree,
            &[],
            matches!(item.vis, Visibility::Public(_)),
            &mut found,
        );
    }
    found
}

/// The name and visibility of an item that has them, and is no module.
pub(crate) fn name_of(item: &Item) -> Option<(String, &Visibility)> {
    let (ident, vis) = match item {
        Item::Const(item) => (&item.ident, &item.vis),
        Item::Enum(item) => (&item.ident, &item.vis),
        Item::Fn(item) => (&item.sig.ident, &item.vis),
        Item::Static(item) => (&item.ident, &item.vis),
        Item::Struct(item) => (&item.ident, &item.vis),
        Item::Trait(item) => (&item.ident, &item.vis),
        Item::Type(item) => (&item.ident, &item.vis),
        Item::Union(item) => (&item.ident, &item.vis),
        _ => return None,
    };
    Some((ident.to_string(), vis))
}

pub(crate) fn docs(attrs: &[Attribute]) -> String {
    let mut docs = String::new();
    for attr in attrs {
        if let Meta::NameValue(meta) = &attr.meta
            && meta.path.is_ident("doc")
            && let Expr::Lit(ExprLit {
                lit: Lit::Str(text),
                ..
            }) = &meta.value
        {
            docs += &text.value();
            docs.push('\n');
        }
    }
    docs
}

/// Whether an item is hidden from documentation, or is there in tests alone.
pub(crate) fn is_left_out(attrs: &[Attribute]) -> bool {
    attrs.iter().any(|attr| {
        let Meta::List(meta) = &attr.meta else {
            return false;
        };
        let tokens = meta.tokens.to_string();
        (meta.path.is_ident("doc") && tokens == "hidden")
            || (meta.path.is_ident("cfg")
                && tokens
                    .split(|c: char| !c.is_alphanumeric())
                    .any(|word| word == "test"))
    })
}

fn flatten(tree: &UseTree, before: &[String], is_public: bool, found: &mut Vec<Import>) {
    let path = |name: String| before.iter().cloned().chain([name]).collect::<Vec<_>>();
    let (path, name) = match tree {
        UseTree::Path(tree) => {
            return flatten(&tree.tree, &path(tree.ident.to_string()), is_public, found);
        }
        UseTree::Group(tree) => {
            return tree
                .items
                .iter()
                .for_each(|tree| flatten(tree, before, is_public, found));
        }
        UseTree::Glob(_) => (before.to_vec(), None),
        UseTree::Rename(tree) => (path(tree.ident.to_string()), Some(tree.rename.to_string())),
        UseTree::Name(tree) if tree.ident == "self" => (before.to_vec(), before.last().cloned()),
        UseTree::Name(tree) => (path(tree.ident.to_string()), Some(tree.ident.to_string())),
    };
    found.push(Import {
        path,
        name,
        is_public,
    });
}

fn module_text(folder: &Path, name: &str) -> String {
    let files: [PathBuf; 2] = [
        folder.join(format!("{name}.rs")),
        folder.join(name).join("mod.rs"),
    ];
    let file = files
        .iter()
        .find(|file| file.is_file())
        .unwrap_or(&files[0]);
    fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
}
