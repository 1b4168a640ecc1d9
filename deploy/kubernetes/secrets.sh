#!/usr/bin/env bash
# Prints the Secrets that the manifests name: the file of tenants, the token for metrics, the seal of the
# cluster's pages, and each tenant's key.
#
#     secrets.sh default another | kubectl apply -f -
#
# Run it once: each run makes new keys. It needs `ems` and `kubectl`, and talks to no cluster.
set -euo pipefail
[ $# -gt 0 ] || { echo "usage: secrets.sh TENANT..." >&2; exit 2; }
umask 077
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export EMS_TENANTS=$folder/tenants.json EMS_SOCKET=$folder/none.sock

secret() { kubectl create secret generic "$1" --namespace=ems --dry-run=client --output=yaml "${@:2}"; echo ---; }

for tenant in "$@"; do
    ems tenant add "$tenant" >&2
    ems key add "$tenant" --out "$folder/$tenant.key" >&2
    printf %s "$tenant" >"$folder/id"
    printf %s "$(cat "$folder/$tenant.key")" >"$folder/key"
    secret "ems-tenant-$tenant" --from-file="access-id=$folder/id" --from-file="access-key=$folder/key"
done
secret ems-tenants --from-file="tenants.json=$EMS_TENANTS"
head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' >"$folder/token"
secret ems-http-token --from-file="token=$folder/token"
head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' >"$folder/seal.key"
secret ems-cluster-seal --from-file="seal.key=$folder/seal.key"
