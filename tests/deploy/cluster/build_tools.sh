#!/bin/sh
# Build what the cluster tests need into FOLDER: helm, kubeconform, kube (apiserver, controller-manager, scheduler), lws (the
# controller of LeaderWorkerSet) with its webhooks' manifest, epp (the gateway's endpoint picker), keda and keda-adapter,
# and FOLDER/crds. Needs Go 1.26 or newer; half an hour on two cores, 600 MB beside Go's own caches. What is there is not
# built again.
set -eu
folder=${1:?build_tools.sh FOLDER}
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$folder/crds"
folder=$(cd "$folder" && pwd)

KUBERNETES=1.36.3

# path of a module's files
module() { go mod download -json "$1" | sed -n 's/^\t"Dir": "\(.*\)",$/\1/p'; }

[ -x "$folder/helm" ] || GOBIN=$folder go install -ldflags "-s -w" helm.sh/helm/v4/cmd/helm@v4.3.1
[ -x "$folder/kubeconform" ] || GOBIN=$folder go install -ldflags "-s -w" github.com/yannh/kubeconform/cmd/kubeconform@v0.7.0

if [ ! -x "$folder/kube" ]; then
    source=$folder/kube-source
    rm -rf "$source" && mkdir "$source" && cp "$here/kube/main.go" "$source" && cd "$source"
    go mod init plait.test/kube
    go mod edit -require "k8s.io/kubernetes@v$KUBERNETES"
    # Kubernetes' own modules have no versions inside its repository.
    manifest=$(go mod download -json "k8s.io/kubernetes@v$KUBERNETES" | sed -n 's/^\t"GoMod": "\(.*\)",$/\1/p')
    for staged in $(grep -oE '^\s+k8s\.io/[a-z0-9-]+ v0\.0\.0$' "$manifest" | awk '{print $1}' | sort -u); do
        go mod edit -replace "$staged=$staged@v0.${KUBERNETES#1.}"
    done
    go mod tidy
    version=k8s.io/component-base/version
    go build -ldflags "-s -w -X $version.gitVersion=v$KUBERNETES -X $version.gitMajor=1 -X $version.gitMinor=36" \
        -o "$folder/kube" .
fi

cd "$folder"
lws=$(module sigs.k8s.io/lws@v0.8.0)
pool=$(module sigs.k8s.io/gateway-api-inference-extension@v1.6.0)
# Later versions have no endpoint picker of their own.
picker=$(module sigs.k8s.io/gateway-api-inference-extension@v1.5.0)
keda=$(module github.com/kedacore/keda/v2@v2.21.0)
prometheus=$(module github.com/prometheus-operator/prometheus-operator@v0.85.0)
if [ ! -x "$folder/lws" ]; then
    # It is built with the versions of its own go.mod, in a copy: a module's folder is read-only.
    rm -rf "$folder/lws-source" && cp -r "$lws" "$folder/lws-source" && chmod -R u+w "$folder/lws-source"
    (cd "$folder/lws-source" && go build -ldflags "-s -w" -o "$folder/lws" ./cmd)
fi
if [ ! -x "$folder/epp" ]; then
    # Its go.work names a folder that the module does not have.
    rm -rf "$folder/epp-source" && cp -r "$picker" "$folder/epp-source" && chmod -R u+w "$folder/epp-source"
    (cd "$folder/epp-source" && GOWORK=off go build -ldflags "-s -w" -o "$folder/epp" ./cmd/epp)
fi
for pair in keda:operator keda-adapter:adapter; do
    [ -x "$folder/${pair%:*}" ] && continue
    [ -d "$folder/keda-source" ] || { cp -r "$keda" "$folder/keda-source" && chmod -R u+w "$folder/keda-source"; }
    (cd "$folder/keda-source" && go build -ldflags "-s -w" -o "$folder/${pair%:*}" "./cmd/${pair#*:}")
done
cp "$lws/config/webhook/manifests.yaml" lws-webhooks.yaml
cp "$lws/config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml" \
    "$pool/config/crd/bases/inference.networking.k8s.io_inferencepools.yaml" \
    "$picker/config/crd/bases/inference.networking.x-k8s.io_inferencemodelrewrites.yaml" \
    "$picker/config/crd/bases/inference.networking.x-k8s.io_inferenceobjectives.yaml" \
    "$keda"/config/crd/bases/*.yaml \
    "$prometheus/example/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml" crds/
chmod u+w crds/* lws-webhooks.yaml
echo "tools are in $folder"
