//! What a user of a crate can name.

use std::collections::{BTreeMap, BTreeSet};

use syn::{Attribute, Fields, Ident, ImplItem, Item as Source, TraitItem, Type, Visibility};

use super::items::{Item, Kind};
use super::modules::{ModulePath, Modules, Target, docs, imports, is_left_out, name_of};

/// All public items of a crate, ordered by their paths.
pub(crate) fn public_items(modules: &Modules) -> Vec<Item> {
    let mut reached = Reached::default();
    walk(modules, &[], &[], &mut reached);
    let mut items = Vec::new();
    for ((module, name), parents) in &reached.items {
        for source in &modules.module(module).items {
            if name_of(source).is_some_and(|(own, _)| own == *name) {
                let place = Place::new(modules, module, name, parents);
                place.add(source, &mut items);
            }
        }
    }
    for (module, source) in modules
        .iter()
        .flat_map(|(path, module)| module.items.iter().map(move |item| (path, item)))
    {
        if let Some(owner) = owner(modules, module, source)
            && let Some(parents) = reached.items.get(&owner)
        {
            Place::new(modules, &owner.0, &owner.1, parents).add_methods(source, &mut items);
        }
    }
    for path in &reached.modules {
        let docs = &modules.module(&path.1).docs;
        items.push(Item::new(
            &[],
            &path.0.join("::"),
            Kind::Module,
            docs,
            (path.1.clone(), String::new()),
        ));
    }
    for source in modules.iter().flat_map(|(_, module)| &module.items) {
        if let Source::Macro(source) = source
            && source
                .attrs
                .iter()
                .any(|attr| attr.path().is_ident("macro_export"))
            && !is_left_out(&source.attrs)
            && let Some(name) = &source.ident
        {
            items.push(Item::new(
                &[],
                &name.to_string(),
                Kind::Macro,
                &docs(&source.attrs),
                Default::default(),
            ));
        }
    }
    items.sort_by(|one, other| one.path().cmp(other.path()));
    items
}

/// By where an item is defined: the paths of the modules that show it.
#[derive(Default)]
struct Reached {
    items: BTreeMap<(ModulePath, String), BTreeSet<Shown>>,
    /// As a user names it, and as it is defined.
    modules: BTreeSet<(Vec<String>, ModulePath)>,
}

/// A public path, with the module whose documentation stands there. Short paths come first.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Shown {
    length: usize,
    path: Vec<String>,
    module: ModulePath,
}

/// Notes what is public in a module that a user names by `path`.
fn walk(modules: &Modules, module: &[String], path: &[String], reached: &mut Reached) {
    for item in &modules.module(module).items {
        if let Source::Mod(item) = item
            && matches!(item.vis, Visibility::Public(_))
            && !is_left_out(&item.attrs)
        {
            let name = item.ident.to_string();
            enter(
                modules,
                &joined(module, &name),
                &joined(path, &name),
                reached,
            );
        }
        if let Some((name, Visibility::Public(_))) = name_of(item)
            && !is_left_out(attributes(item))
        {
            show(
                reached,
                (module.to_vec(), name.clone()),
                module,
                joined(path, &name),
            );
        }
        for import in imports(item).into_iter().filter(|import| import.is_public) {
            match (modules.resolve(module, &import.path), import.name) {
                (Some(Target::Item(at, name)), Some(shown)) => {
                    show(reached, (at, name), module, joined(path, &shown));
                }
                (Some(Target::Module(at)), Some(shown)) => {
                    enter(modules, &at, &joined(path, &shown), reached);
                }
                (Some(Target::Module(at)), None) => walk(modules, &at, path, reached),
                _ => {}
            }
        }
    }
}

fn enter(modules: &Modules, module: &[String], path: &[String], reached: &mut Reached) {
    if reached.modules.insert((path.to_vec(), module.to_vec())) {
        walk(modules, module, path, reached);
    }
}

fn show(reached: &mut Reached, item: (ModulePath, String), module: &[String], path: Vec<String>) {
    let shown = Shown {
        length: path.len(),
        path,
        module: module.to_vec(),
    };
    reached.items.entry(item).or_default().insert(shown);
}

fn joined(path: &[String], name: &str) -> Vec<String> {
    path.iter().cloned().chain([name.to_owned()]).collect()
}

/// The type of this crate that an `impl` without a trait belongs to.
fn owner(modules: &Modules, module: &[String], source: &Source) -> Option<(ModulePath, String)> {
    let Source::Impl(item) = source else {
        return None;
    };
    if item.trait_.is_some() || is_left_out(&item.attrs) {
        return None;
    }
    let Type::Path(ty) = &*item.self_ty else {
        return None;
    };
    let path: Vec<_> = ty
        .path
        .segments
        .iter()
        .map(|segment| segment.ident.to_string())
        .collect();
    match modules.resolve(module, &path)? {
        Target::Item(at, name) => Some((at, name)),
        Target::Module(_) => None,
    }
}

fn attributes(item: &Source) -> &[Attribute] {
    match item {
        Source::Const(item) => &item.attrs,
        Source::Enum(item) => &item.attrs,
        Source::Fn(item) => &item.attrs,
        Source::Static(item) => &item.attrs,
        Source::Struct(item) => &item.attrs,
        Source::Trait(item) => &item.attrs,
        Source::Type(item) => &item.attrs,
        Source::Union(item) => &item.attrs,
        _ => &[],
    }
}

/// Where the items of one definition go.
struct Place {
    defined: (ModulePath, String),
    path: String,
    module_docs: Vec<String>,
}

impl Place {
    fn new(modules: &Modules, module: &ModulePath, name: &str, shown: &BTreeSet<Shown>) -> Self {
        let docs = |module: &ModulePath| modules.module(module).docs.clone();
        let around: BTreeSet<&ModulePath> = shown
            .iter()
            .map(|shown| &shown.module)
            .chain([module])
            .collect();
        Self {
            defined: (module.clone(), name.to_owned()),
            path: shown
                .first()
                .map(|shown| shown.path.join("::"))
                .unwrap_or_default(),
            module_docs: around.into_iter().map(docs).collect(),
        }
    }

    fn add(&self, source: &Source, items: &mut Vec<Item>) {
        let kind = if matches!(source, Source::Fn(_)) {
            Kind::Function
        } else {
            Kind::Name
        };
        items.push(Item::new(
            &self.module_docs,
            &self.path,
            kind,
            &docs(attributes(source)),
            self.defined.clone(),
        ));
        match source {
            Source::Struct(source) => self.add_fields(&source.fields, items),
            Source::Enum(source) => {
                for variant in &source.variants {
                    self.add_part(&variant.ident, Kind::Associated, &variant.attrs, items);
                }
            }
            Source::Trait(source) => {
                for item in &source.items {
                    match item {
                        TraitItem::Fn(item) => {
                            self.add_part(&item.sig.ident, Kind::TraitMethod, &item.attrs, items);
                        }
                        TraitItem::Const(item) => {
                            self.add_part(&item.ident, Kind::TraitMethod, &item.attrs, items);
                        }
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }

    fn add_fields(&self, fields: &Fields, items: &mut Vec<Item>) {
        for field in fields {
            if let (Some(name), Visibility::Public(_)) = (&field.ident, &field.vis) {
                self.add_part(name, Kind::Field, &field.attrs, items);
            }
        }
    }

    fn add_methods(&self, source: &Source, items: &mut Vec<Item>) {
        let Source::Impl(source) = source else { return };
        for item in &source.items {
            match item {
                ImplItem::Fn(item) if matches!(item.vis, Visibility::Public(_)) => {
                    let kind = match item.sig.receiver() {
                        Some(_) => Kind::Method,
                        None => Kind::Associated,
                    };
                    self.add_part(&item.sig.ident, kind, &item.attrs, items);
                }
                ImplItem::Const(item) if matches!(item.vis, Visibility::Public(_)) => {
                    self.add_part(&item.ident, Kind::Associated, &item.attrs, items);
                }
                _ => {}
            }
        }
    }

    fn add_part(&self, name: &Ident, kind: Kind, attrs: &[Attribute], items: &mut Vec<Item>) {
        if !is_left_out(attrs) {
            let path = format!("{}::{name}", self.path);
            items.push(Item::new(
                &self.module_docs,
                &path,
                kind,
                &docs(attrs),
                self.defined.clone(),
            ));
        }
    }
}
