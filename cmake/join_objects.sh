#!/bin/sh
# join_objects.sh OUT LINKER NM OBJCOPY objects...
# Joins objects into one in which every weak function (an inline function or a template's instance, which the linker
# would otherwise merge with other files' copies) is local. Inline variables become weak: a sanitizer's build holds them
# even where they are constants, and as unique symbols without their group they would be defined twice.
set -eu
out=$1 linker=$2 nm=$3 objcopy=$4
shift 4
"$linker" -r --force-group-allocation -o "$out.joined" "$@"
"$nm" --defined-only "$out.joined" | sed -n 's/^[0-9a-f]* W //p' | sort -u >"$out.weak"
"$nm" --defined-only "$out.joined" | sed -n 's/^[0-9a-f]* u //p' | sort -u >"$out.unique"
set --  # objcopy fails on an empty list
[ ! -s "$out.weak" ] || set -- "$@" --localize-symbols="$out.weak"
[ ! -s "$out.unique" ] || set -- "$@" --weaken-symbols="$out.unique"
"$objcopy" "$@" "$out.joined" "$out"
rm -f "$out.joined" "$out.weak" "$out.unique"
